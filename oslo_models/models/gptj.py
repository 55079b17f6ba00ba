"""GPT-J: rotary positions, attention and MLP side by side on one norm, a head of its own with a bias."""

from __future__ import annotations

from transformers import GPTJConfig
from transformers.models.gptj import modeling_gptj as hf
from transformers.models.gptj.modeling_gptj import GPTJMLP, GPTJAttention, GPTJBlock

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class GPTJParallel(ParallelModel):
    """How every model of the GPT-J family divides."""

    @classmethod
    def plan(cls, config: GPTJConfig) -> Plan:
        heads = EvenSplit(config.n_head, config.n_embd // config.n_head)
        block = {
            "ln_1": Norm(),
            "attn.q_proj": ColumnParallel(heads),
            "attn.k_proj": ColumnParallel(heads),
            "attn.v_proj": ColumnParallel(heads),
            "attn.out_proj": RowParallel(heads),
            "mlp.fc_in": ColumnParallel(),
            "mlp.fc_out": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            dropout=("drop",),
            local={"attn.num_attention_heads": heads.local_count},
        )


class GPTJModel(GPTJParallel, hf.GPTJModel):
    pass


class GPTJForCausalLM(GPTJParallel, hf.GPTJForCausalLM):
    head_plan = {"lm_head": VocabParallel()}


class GPTJForSequenceClassification(GPTJParallel, hf.GPTJForSequenceClassification):
    head_plan = {"score": Replicated()}


class GPTJForQuestionAnswering(GPTJParallel, hf.GPTJForQuestionAnswering):
    head_plan = {"qa_outputs": Replicated()}
