"""Stand-ins for a model with pipeline stages, for code that calls a model once and expects one output.

The model itself returns an iterator over micro-batches. `TrainingStages` returns its outputs one by one;
`EvaluationStages` returns the output of the whole batch on every stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import broadcast_object
from oslo_models.modeling.base import ParallelModel
from oslo_models.pipeline.batch_rows import count_rows
from oslo_models.pipeline.micro_batch_loss import asks_for_loss


class _Stages:
    """Base class of both stand-ins: forwards attributes and calls to the model.

    Args:
        module: the model or a wrapper around it; calls go to it.
        model: the model.
    """

    def __init__(self, module: Any, model: ParallelModel) -> None:
        self.module, self.model = module, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def _call(self, batch: Mapping[str, Any]) -> Iterator[Any]:
        """Call the model. If needed, reduce the micro-batch size so that it divides the batch size (see `division`)."""
        size = self.model.micro_batch_size
        _, self.model.micro_batch_size = division(self.model, batch)
        try:
            outputs: Iterator[Any] = self.module(**batch)
        finally:
            self.model.micro_batch_size = size
        return outputs


class TrainingStages(_Stages):
    """Stands in for the model while one batch is trained: each call returns the output of the next micro-batch.

    Between two calls, the caller runs the backward pass of the loss. Use it as a context manager. Its exit ends the
    loop over micro-batches: tied gradients are summed over the stages. If this stage raises, the exit completes the
    communication with the other stages.
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
        """Return the output of the next micro-batch.

        Raises:
            ValueError: the arguments do not ask for a loss. Pipeline stages need one for training.
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
        """Run all micro-batches. Sum the losses, which are shares of the batch's loss, and concatenate the rows.

        Fields with gaps on the last stage are left out, such as the hidden states and attentions of all blocks.
        """
        mesh, stage = self.model.mesh, self.model.stage
        assert mesh is not None and stage is not None
        outputs = [
            {name: value for name, value in output.items() if not _has_gaps(value)} for output in self._call(batch)
        ]
        fields = _concatenate(outputs) if stage.is_last else {}
        return ModelOutput(broadcast_tensors(mesh.pp, fields, stage.count - 1, mesh.device))


def division(model: ParallelModel, batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of micro-batches of a batch, and their size.

    The size is the greatest common divisor of the batch size and the model's ``micro_batch_size``. A batch without any
    rows counts as one row; the model refuses it.
    """
    rows = count_rows(batch, model.main_input_name) or 1
    size = math.gcd(rows, model.micro_batch_size)
    return rows // size, size


def _has_gaps(value: Any) -> bool:
    """Return whether a nested value is ``None`` for some blocks, because other stages have them."""
    return isinstance(value, (tuple, list)) and any(each is None or _has_gaps(each) for each in value)


def _concatenate(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the output of a batch from the outputs of its micro-batches."""
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
    """Broadcast nested tuples, lists and dictionaries of tensors from position ``src`` on the axis."""
    skeleton = broadcast_object(axis, tree_map_only(Tensor, lambda x: _TensorLike(x.shape, x.dtype), data), src)
    if axis.rank == src:
        return tree_map_only(Tensor, lambda x: broadcast(axis, x.contiguous(), src), data)

    def receive(like: _TensorLike) -> Tensor:
        return broadcast(axis, torch.empty(like.shape, dtype=like.dtype, device=device), src)

    return tree_map_only(_TensorLike, receive, skeleton)


def autocast_micro_batches(model: nn.Module, autocast: Any) -> None:
    """Run the loop over micro-batches under autocast: accelerate's own wrapper ends before the loop starts."""
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
