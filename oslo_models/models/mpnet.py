"""MPNet: BERT with relative position biases for each head, shared by all blocks."""

from dataclasses import replace
from typing import Any

from transformers import MPNetConfig
from transformers.models.mpnet import modeling_mpnet as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.layout import EvenSplit


class MPNetParallel(BertParallel):
    """Sharding plan of the MPNet family."""

    added_embeddings = ("position",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        (block,) = plan.blocks.values()
        mlp = {name: entry for name, entry in block.items() if not name.startswith("attention.")}
        attention = {
            "attention.attn": LocalAttributes({"all_head_size": heads.local_extent}),
            **qkv("attention.attn", heads, "qkv"),
            "attention.attn.o": RowParallel(heads),
        }
        return replace(
            plan,
            blocks={"encoder.layer": {**attention, "attention.LayerNorm": Norm(), **mlp}},
        ).with_rules(
            on_every_stage={"encoder.relative_attention_bias": ColumnParallel(EvenSplit(heads.count), transposed=True)}
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
