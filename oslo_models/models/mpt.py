"""MPT: ALiBi, with query, key and value in one matrix."""

from typing import Any

from transformers import MptConfig
from transformers.models.mpt import modeling_mpt as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE


class MptParallel(ParallelModel):
    """Sharding plan of the MPT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "norm_1": Norm(),
            "attn": LocalAttributes({"n_heads": heads.local_count}, per_head={"position_bias": heads}),
            "attn.Wqkv": ColumnParallel(heads, heads, heads),
            "attn.out_proj": RowParallel(heads),
            "norm_2": Norm(),
            "ffn.up_proj": ColumnParallel(),
            "ffn.down_proj": RowParallel(),
        }
        return Plan(
            embed={"wte": VocabParallel()},
            blocks={"blocks": block},
            head={"norm_f": Norm()},
        )


class MptModel(MptParallel, hf.MptModel):
    pass


class MptForCausalLM(MptParallel, hf.MptForCausalLM):
    head_plan = LM_HEAD


class MptForSequenceClassification(MptParallel, hf.MptForSequenceClassification):
    head_plan = SCORE


class MptForTokenClassification(MptParallel, hf.MptForTokenClassification):
    head_plan = CLASSIFIER


class MptForQuestionAnswering(MptParallel, hf.MptForQuestionAnswering):
    head_plan = QA_OUTPUTS
