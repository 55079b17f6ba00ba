"""I-BERT: RoBERTa that learns activation ranges for integer inference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import IBertConfig
from transformers.models.ibert import modeling_ibert as hf

from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.kinds import ShardedModule, shards
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.plan import Plan, Replicated

RANGES = (
    *(f"attention.self.{name}_activation" for name in ("query", "key", "value", "output")),
    *("intermediate.output_activation", "pre_output_act"),
)


@dataclass(frozen=True)
class GlobalMinMax(Replicated):
    """Module that takes the minimum and maximum of a sharded activation. Both are all-reduced."""


@shards(GlobalMinMax)
class GlobalMinMaxLayer(ShardedModule):
    """Module that calls ``min`` and ``max`` on a sharded activation. Both are all-reduced."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def largest(x: Tensor) -> Tensor:
            return reduce_fresh(self.tp, x.max(), MAX)

        with FunctionOverrides({Tensor.max: largest, Tensor.min: lambda x: -largest(-x)}):
            return super().forward(*args, **kwargs)


class IBertParallel(BertParallel):
    """Sharding plan of the I-BERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        reason = (
            "with quant_mode=True, it rounds activations, and rounded partial outputs do not add up to the rounded sum"
        )
        return replace(
            plan,
            blocks={"encoder.layer": {**block, **{name: GlobalMinMax() for name in RANGES}}},
            single_rank_reason=reason if config.quant_mode else "",
        ).with_rules(
            single_stage_reason="its layers also pass on a quantisation scale, and stages exchange hidden states only"
        )


class IBertModel(IBertParallel, hf.IBertModel):
    pass


class IBertForMaskedLM(IBertParallel, hf.IBertForMaskedLM):
    head_plan = LM_HEAD


class IBertForSequenceClassification(IBertParallel, hf.IBertForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class IBertForMultipleChoice(IBertParallel, hf.IBertForMultipleChoice):
    head_plan = CLASSIFIER


class IBertForTokenClassification(IBertParallel, hf.IBertForTokenClassification):
    head_plan = CLASSIFIER


class IBertForQuestionAnswering(IBertParallel, hf.IBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
