"""XLNet: permutation language modelling with attention to relative positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import XLNetConfig
from transformers.models.xlnet import modeling_xlnet as hf

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalValue,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.local_attributes import set_local_attributes
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS, SPAN_PREDICTION
from oslo_models.sharding.layout import EvenSplit, Layout

SUMMARY: Entries = {"sequence_summary.summary": Replicated(), "logits_proj": Replicated()}


@dataclass(frozen=True)
class EinsumHeads(Replicated):
    """Attention with weight parameters ``[..., heads, head_dim]`` that its forward applies with ``einsum``.

    Args:
        heads: the split of the heads, of width 1.
        attributes: see `LocalAttributes`.
    """

    heads: EvenSplit
    attributes: Mapping[str, LocalValue] = field(default_factory=dict)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout.sharded(shape, len(shape) - 2, (self.heads,), n)

    def max_ranks(self) -> int | None:
        return self.heads.max_ranks()


class HeadWeight(Tensor):
    """Local heads of a weight ``[..., heads, width]``.

    A product that creates the head dimension enters a sharded region. A product that sums over the heads leaves it.
    """

    tp: Axis
    stream: ShardedRngStream | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.einsum and len(args) == 3 and isinstance(args[2], cls):
            return args[2]._product(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _product(self, equation: str, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            weight = self.as_subclass(Tensor)
        inputs, _, result = equation.partition("->")
        x_dims, weight_dims = inputs.split(",")
        heads = weight_dims[-2]
        if heads not in x_dims:
            if self.stream is not None:
                self.stream.enter()
            x = copy_to(self.tp, x)
        if heads in result:
            return torch.einsum(equation, x, weight)
        if self.stream is not None:
            self.stream.leave()
        return reduce_from(self.tp, torch.einsum(equation, x, weight))


@shards(EinsumHeads)
class EinsumHeadsLayer(ShardedModule):
    """Mixin before an attention class. The forward reads three-dimensional parameters as `HeadWeight`."""

    def configure(self, entry: EinsumHeads, context: ShardingContext) -> None:
        super().configure(entry, context)
        set_local_attributes(self, entry.attributes, context.tp)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        for name, param in self._parameters.items():
            if param is not None and param.dim() == 3:
                attributes[name] = weight = param.as_subclass(HeadWeight)  # hides the parameter of this name
                weight.tp, weight.stream = self.tp, self.stream if self.training else None
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self._parameters:
                attributes.pop(name, None)


class XLNetParallel(ParallelModel):
    """Sharding plan of the XLNet family."""

    casts_float32 = True

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block = {
            "rel_attn": EinsumHeads(EvenSplit(config.n_head)),
            "rel_attn.layer_norm": Norm(),
            "ff.layer_1": ColumnParallel(),
            "ff.layer_2": RowParallel(),
            "ff.layer_norm": Norm(),
        }
        return Plan(
            embed={"word_embedding": VocabParallel(), "mask_emb": Replicated()},
            blocks={"layer": block},
            head={},
        ).with_rules(
            single_stage_reason="one dropout is applied to the embeddings, the positions and the last hidden state"
        )


class XLNetModel(XLNetParallel, hf.XLNetModel):
    pass


class XLNetLMHeadModel(XLNetParallel, hf.XLNetLMHeadModel):
    head_plan = {"lm_loss": VocabParallel()}


class XLNetForSequenceClassification(XLNetParallel, hf.XLNetForSequenceClassification):
    head_plan = SUMMARY


class XLNetForMultipleChoice(XLNetParallel, hf.XLNetForMultipleChoice):
    head_plan = SUMMARY


class XLNetForTokenClassification(XLNetParallel, hf.XLNetForTokenClassification):
    head_plan = CLASSIFIER


class XLNetForQuestionAnsweringSimple(XLNetParallel, hf.XLNetForQuestionAnsweringSimple):
    head_plan = QA_OUTPUTS


class XLNetForQuestionAnswering(XLNetParallel, hf.XLNetForQuestionAnswering):
    head_plan = SPAN_PREDICTION
