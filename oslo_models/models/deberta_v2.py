"""DeBERTa-v2 and v3: DeBERTa with bucketed positions and a convolution. Without the head of `legacy=False`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2 as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD
from oslo_models.models.deberta import DebertaParallel
from oslo_models.sharding.layout import EvenSplit


class DebertaV2Parallel(DebertaParallel):
    """Sharding plan of the DeBERTa-v2 family."""

    @classmethod
    def projections(cls, heads: EvenSplit) -> Mapping[str, ColumnParallel]:
        names = ("query_proj", "key_proj", "value_proj", "pos_key_proj", "pos_query_proj")
        return dict.fromkeys(names, ColumnParallel(heads))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        convolution = {
            "encoder.conv.conv": Replicated(),
            "encoder.conv.LayerNorm": Norm(),
        }  # applied after the first block
        return replace(
            plan,
            embed={**plan.embed, **convolution},
            optional=(*plan.optional, *convolution, "encoder.LayerNorm"),
        ).with_rules(
            on_every_stage={**plan.pipeline.on_every_stage, "encoder.LayerNorm": Norm()},
            disabled_after_first_stage={**plan.pipeline.disabled_after_first_stage, "encoder.conv": None},
        )


class DebertaV2Model(DebertaV2Parallel, hf.DebertaV2Model):
    pass


class DebertaV2ForMaskedLM(DebertaV2Parallel, hf.DebertaV2ForMaskedLM):
    head_plan = LM_HEAD


class DebertaV2ForSequenceClassification(DebertaV2Parallel, hf.DebertaV2ForSequenceClassification):
    head_plan = {"pooler.dense": Replicated(), "classifier": Replicated()}


class DebertaV2ForMultipleChoice(DebertaV2Parallel, hf.DebertaV2ForMultipleChoice):
    head_plan = {"pooler.dense": Replicated(), "classifier": Replicated()}


class DebertaV2ForTokenClassification(DebertaV2Parallel, hf.DebertaV2ForTokenClassification):
    head_plan = CLASSIFIER


class DebertaV2ForQuestionAnswering(DebertaV2Parallel, hf.DebertaV2ForQuestionAnswering):
    head_plan = QA_OUTPUTS
