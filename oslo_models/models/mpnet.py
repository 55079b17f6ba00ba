"""MPNet: BERT with a bias of each head for the distance of two tokens, which all blocks share."""

from dataclasses import replace
from typing import Any

from transformers import MPNetConfig
from transformers.models.mpnet import modeling_mpnet as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, RowParallel


class MPNetParallel(BertParallel):
    """How every model of the MPNet family divides."""

    tables = ("position",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, count = super().plan(config), config.num_attention_heads
        heads = EvenSplit(count, config.hidden_size // count)
        (block,) = plan.blocks.values()
        mlp = {name: entry for name, entry in block.items() if not name.startswith("attention.")}
        attention = {
            **{f"attention.attn.{name}": ColumnParallel(heads) for name in "qkv"},
            "attention.attn.o": RowParallel(heads),
        }
        return replace(
            plan,
            blocks={"encoder.layer": {**attention, "attention.LayerNorm": Norm(), **mlp}},
            beside={"encoder.relative_attention_bias": ColumnParallel(EvenSplit(count), transposed=True)},
            local={"attention.attn.all_head_size": heads.local_extent},
        )


class MPNetModel(MPNetParallel, hf.MPNetModel):
    pass


class MPNetForMaskedLM(MPNetParallel, hf.MPNetForMaskedLM):
    head_plan = LM_HEAD


class MPNetForSequenceClassification(MPNetParallel, hf.MPNetForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class MPNetForMultipleChoice(MPNetParallel, hf.MPNetForMultipleChoice):
    head_plan = CLASSIFIER


class MPNetForTokenClassification(MPNetParallel, hf.MPNetForTokenClassification):
    head_plan = CLASSIFIER


class MPNetForQuestionAnswering(MPNetParallel, hf.MPNetForQuestionAnswering):
    head_plan = QA_OUTPUTS
