"""GPT-Neo: GPT-2 with separate projections and, in every other block, attention to a local window."""

from __future__ import annotations

from transformers import GPTNeoConfig
from transformers.models.gpt_neo import modeling_gpt_neo as hf
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoAttention, GPTNeoBlock, GPTNeoMLP, GPTNeoSelfAttention

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class GPTNeoParallel(ParallelModel):
    """How every model of the GPT-Neo family divides."""

    @classmethod
    def plan(cls, config: GPTNeoConfig) -> Plan:
        heads = Units(config.num_heads, config.hidden_size // config.num_heads)
        block = {
            "ln_1": Norm(),
            "attn.attention.q_proj": Column(heads),
            "attn.attention.k_proj": Column(heads),
            "attn.attention.v_proj": Column(heads),
            "attn.attention.out_proj": Row(heads),
            "ln_2": Norm(),
            "mlp.c_fc": Column(),
            "mlp.c_proj": Row(),
        }
        return Plan(
            embed={"wte": Vocab(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            dropout=("drop",),
            local={"attn.attention.num_heads": heads.local_count},
        )


class GPTNeoModel(GPTNeoParallel, hf.GPTNeoModel):
    pass


class GPTNeoForCausalLM(GPTNeoParallel, hf.GPTNeoForCausalLM):
    head = {"lm_head": Vocab()}


class GPTNeoForSequenceClassification(GPTNeoParallel, hf.GPTNeoForSequenceClassification):
    head = {"score": Replicated()}


class GPTNeoForTokenClassification(GPTNeoParallel, hf.GPTNeoForTokenClassification):
    head = {"classifier": Replicated()}


class GPTNeoForQuestionAnswering(GPTNeoParallel, hf.GPTNeoForQuestionAnswering):
    head = {"qa_outputs": Replicated()}
