"""Stand-ins for a model split into pipeline stages, where code calls a model once and expects one output.

The model itself returns a loop over micro-batches. `TrainingStages` gives its outputs one by one, `EvaluationStages`
the output of the whole batch on every stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import broadcast_object
from oslo_models.modeling.base import ParallelModel
from oslo_models.pipeline.batch_rows import count_rows
from oslo_models.pipeline.micro_batch_loss import asks_for_loss


class _Stages:
    """What both stand-ins share: attributes of the wrapped model, and calls of it.

    Args:
        module: the model or a wrapper of it, which is called.
        model: the model.
    """

    def __init__(self, module: Any, model: ParallelModel) -> None:
        self.module, self.model = module, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def _call(self, batch: Mapping[str, Any]) -> Iterator[Any]:
        """Call the model. A batch whose rows its micro-batches do not divide gets the largest smaller ones that do."""
        size = self.model.micro_batch_size
        _, self.model.micro_batch_size = division(self.model, batch)
        try:
            outputs: Iterator[Any] = self.module(**batch)
        finally:
            self.model.micro_batch_size = size
        return outputs


class TrainingStages(_Stages):
    """Stands in for the model in the steps of one batch: each call returns the output of the next micro-batch.

    Between two calls, the caller runs the backward pass of the loss. Used as a context manager, which ends the loop:
    tied gradients are summed over the stages, or, if this one raises, the communication with the others is completed.
    """

    def __init__(self, module: Any, model: ParallelModel) -> None:
        super().__init__(module, model)
        self._outputs: Any = None

    def __enter__(self) -> TrainingStages:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._outputs is not None:
            self._outputs.close()

    def __call__(self, **batch: Any) -> Any:
        """The output of the next micro-batch.

        Raises:
            ValueError: the arguments do not ask for a loss, without which stages cannot be trained.
        """
        if self._outputs is None:
            if not asks_for_loss(batch, self.model.loss_inputs):
                raise ValueError(
                    f"pipeline stages are trained by the loss of the model, and {type(self.model).__name__} was called "
                    f"without labels, with {sorted(batch)}: use a loss that the model computes, or load it with "
                    "pipeline_parallel_size=1"
                )
            self._outputs = self._call(batch)
        return next(self._outputs)


class EvaluationStages(_Stages):
    """Stands in for the model without gradients: a call returns the output of the whole batch on every stage."""

    def __call__(self, **batch: Any) -> ModelOutput:
        """Run all micro-batches. Losses are summed, as they are shares of that of the batch; rows are concatenated.

        Fields that the last stage has in part only are left out: the hidden states and attentions of all blocks.
        """
        mesh, stage = self.model.mesh, self.model.stage
        assert mesh is not None and stage is not None
        outputs = [
            {name: value for name, value in output.items() if not _has_gaps(value)} for output in self._call(batch)
        ]
        fields = _concatenate(outputs) if stage.is_last else {}
        return ModelOutput(broadcast_tensors(mesh.pp, fields, stage.count - 1, mesh.device))


def division(model: ParallelModel, batch: Mapping[str, Any]) -> tuple[int, int]:
    """The number of micro-batches of a batch, and their rows.

    Their rows are the largest number that divides the rows of the batch and the model's size of micro-batches. A batch
    in which nothing has rows counts as one row; the model refuses it.
    """
    rows = count_rows(batch, model.main_input_name) or 1
    size = math.gcd(rows, model.micro_batch_size)
    return rows // size, size


def _has_gaps(value: Any) -> bool:
    """Whether this holds nothing for some blocks, which are on other stages."""
    return isinstance(value, (tuple, list)) and any(each is None or _has_gaps(each) for each in value)


def _concatenate(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The output of a batch from those of its micro-batches."""
    joined = {name: _join([output[name] for output in outputs]) for name in outputs[0]}
    if joined.get("loss") is not None:
        joined["loss"] = torch.stack([output["loss"] for output in outputs]).sum()
    return joined


def _join(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, (tuple, list)):
        return tuple(_join(each) for each in zip(*parts, strict=True))
    if isinstance(first, Mapping):
        return {key: _join([part[key] for part in parts]) for key in first}
    return first


@dataclass(frozen=True)
class _TensorLike:
    shape: torch.Size
    dtype: torch.dtype


def broadcast_tensors(axis: Axis, data: Any, src: int, device: torch.device) -> Any:
    """Return the nested tuples, lists and dictionaries of tensors that position ``src`` on the axis passed."""
    skeleton = broadcast_object(axis, tree_map_only(Tensor, lambda x: _TensorLike(x.shape, x.dtype), data), src)
    if axis.rank == src:
        return tree_map_only(Tensor, lambda x: broadcast(axis, x.contiguous(), src), data)

    def receive(like: _TensorLike) -> Tensor:
        return broadcast(axis, torch.empty(like.shape, dtype=like.dtype, device=device), src)

    return tree_map_only(_TensorLike, receive, skeleton)


def autocast_micro_batches(model: Any, autocast: Any) -> None:
    """Let the loop over micro-batches run under autocast: accelerate's wrapper of ``forward`` ends before it begins."""
    forward = model.forward

    def loop(outputs: Iterator[Any]) -> Iterator[Any]:
        try:
            while True:
                with autocast():
                    try:
                        output = next(outputs)
                    except StopIteration:
                        return
                yield output
        finally:
            outputs.close()  # type: ignore[attr-defined]

    def autocast_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return loop(outputs) if isinstance(outputs, Iterator) else outputs

    model.forward = MethodType(autocast_forward, model)
