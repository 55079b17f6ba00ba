"""GPT-J: rotary positions, attention and MLP side by side on one norm, a head of its own with a bias."""

from __future__ import annotations

from transformers import GPTJConfig
from transformers.models.gptj import modeling_gptj as hf
from transformers.models.gptj.modeling_gptj import GPTJMLP, GPTJAttention, GPTJBlock

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class GPTJParallel(ParallelModel):
    """How every model of the GPT-J family divides."""

    @classmethod
    def plan(cls, config: GPTJConfig) -> Plan:
        heads = Units(config.n_head, config.n_embd // config.n_head)
        block = {
            "ln_1": Norm(),
            "attn.q_proj": Column(heads),
            "attn.k_proj": Column(heads),
            "attn.v_proj": Column(heads),
            "attn.out_proj": Row(heads),
            "mlp.fc_in": Column(),
            "mlp.fc_out": Row(),
        }
        return Plan(
            embed={"wte": Vocab()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            dropout=("drop",),
            local={"attn.num_attention_heads": heads.local_count},
        )


class GPTJModel(GPTJParallel, hf.GPTJModel):
    pass


class GPTJForCausalLM(GPTJParallel, hf.GPTJForCausalLM):
    head = {"lm_head": Vocab()}


class GPTJForSequenceClassification(GPTJParallel, hf.GPTJForSequenceClassification):
    head = {"score": Replicated()}


class GPTJForQuestionAnswering(GPTJParallel, hf.GPTJForQuestionAnswering):
    head = {"qa_outputs": Replicated()}
