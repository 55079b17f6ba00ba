"""GPT-BigCode (StarCoder): GPT-2 with multi-query attention."""

from typing import Any

from transformers import GPTBigCodeConfig
from transformers.models.gpt_bigcode import modeling_gpt_bigcode as hf

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
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, SCORE
from oslo_models.sharding.layout import GroupedHeads


class GPTBigCodeParallel(ParallelModel):
    """Sharding plan of the GPT-BigCode family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        count = config.n_head
        heads = GroupedHeads(count, 1 if config.multi_query else count, config.n_embd // count)
        one = ColumnParallel(heads.query, heads.key_value, heads.key_value)
        local = {
            "num_heads": heads.query.local_count,
            "embed_dim": heads.query.local_extent,
            "num_key_value_groups": heads.local_ratio,
        }
        block = {
            "ln_1": Norm(),
            "attn": LocalAttributes(local),
            "attn.c_attn": one if config.multi_query else ColumnParallel(*heads.interleaved),
            "attn.c_proj": RowParallel(heads.query),
            "ln_2": Norm(),
            "mlp.c_fc": ColumnParallel(),
            "mlp.c_proj": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel(), "wpe": Replicated()},
            blocks={"h": block},
            head={"ln_f": Norm()},
        ).with_rules(embedding_dropouts=("drop",))


class GPTBigCodeModel(GPTBigCodeParallel, hf.GPTBigCodeModel):
    pass


class GPTBigCodeForCausalLM(GPTBigCodeParallel, hf.GPTBigCodeForCausalLM):
    head_plan = LM_HEAD


class GPTBigCodeForSequenceClassification(GPTBigCodeParallel, hf.GPTBigCodeForSequenceClassification):
    head_plan = SCORE


class GPTBigCodeForTokenClassification(GPTBigCodeParallel, hf.GPTBigCodeForTokenClassification):
    head_plan = CLASSIFIER
