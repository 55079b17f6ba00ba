"""GPT-Neo: GPT-2 with separate projections, and local attention in every other block."""

from __future__ import annotations

from transformers import GPTNeoConfig
from transformers.models.gpt_neo import modeling_gpt_neo as hf
from transformers.models.gpt_neo.modeling_gpt_neo import (
    GPTNeoAttention,
    GPTNeoBlock,
    GPTNeoMLP,
    GPTNeoSelfAttention,
)

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE


class GPTNeoParallel(ParallelModel):
    """Sharding plan of the GPT-Neo family."""

    @classmethod
    def plan(cls, config: GPTNeoConfig) -> Plan:
        heads = heads_of(config)
        block = {
            "ln_1": Norm(),
            "attn.attention": LocalAttributes({"num_heads": heads.local_count}),
            **qkv("attn.attention", heads),
            "attn.attention.out_proj": RowParallel(heads),
            "ln_2": Norm(),
            "mlp.c_fc": ColumnParallel(),
            "mlp.c_proj": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
        ).with_rules(embedding_dropouts=("drop",))


class GPTNeoModel(GPTNeoParallel, hf.GPTNeoModel):
    pass


class GPTNeoForCausalLM(GPTNeoParallel, hf.GPTNeoForCausalLM):
    head_plan = LM_HEAD


class GPTNeoForSequenceClassification(GPTNeoParallel, hf.GPTNeoForSequenceClassification):
    head_plan = SCORE


class GPTNeoForTokenClassification(GPTNeoParallel, hf.GPTNeoForTokenClassification):
    head_plan = CLASSIFIER


class GPTNeoForQuestionAnswering(GPTNeoParallel, hf.GPTNeoForQuestionAnswering):
    head_plan = QA_OUTPUTS
