"""GPT-Neo: GPT-2 with separate projections and, in every other block, attention to a local window."""

from __future__ import annotations

from transformers import GPTNeoConfig
from transformers.models.gpt_neo import modeling_gpt_neo as hf
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoAttention, GPTNeoBlock, GPTNeoMLP, GPTNeoSelfAttention

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class GPTNeoParallel(ParallelModel):
    """How every model of the GPT-Neo family divides."""

    @classmethod
    def plan(cls, config: GPTNeoConfig) -> Plan:
        heads = EvenSplit(config.num_heads, config.hidden_size // config.num_heads)
        block = {
            "ln_1": Norm(),
            "attn.attention.q_proj": ColumnParallel(heads),
            "attn.attention.k_proj": ColumnParallel(heads),
            "attn.attention.v_proj": ColumnParallel(heads),
            "attn.attention.out_proj": RowParallel(heads),
            "ln_2": Norm(),
            "mlp.c_fc": ColumnParallel(),
            "mlp.c_proj": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            dropout=("drop",),
            local={"attn.attention.num_heads": heads.local_count},
        )


class GPTNeoModel(GPTNeoParallel, hf.GPTNeoModel):
    pass


class GPTNeoForCausalLM(GPTNeoParallel, hf.GPTNeoForCausalLM):
    head_plan = {"lm_head": VocabParallel()}


class GPTNeoForSequenceClassification(GPTNeoParallel, hf.GPTNeoForSequenceClassification):
    head_plan = {"score": Replicated()}


class GPTNeoForTokenClassification(GPTNeoParallel, hf.GPTNeoForTokenClassification):
    head_plan = {"classifier": Replicated()}


class GPTNeoForQuestionAnswering(GPTNeoParallel, hf.GPTNeoForQuestionAnswering):
    head_plan = {"qa_outputs": Replicated()}
