"""Keeps ``GradScaler`` in step on all ranks of a model.

With float16 autocast, a gradient may overflow on one rank only, whose scaler would then skip a step that the others
take. When a backward pass ends, the ranks therefore tell each other, and an overflow of one becomes one of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis


def share_overflow_now(parameters: Callable[[], Iterable[Tensor]], axis: Axis) -> None:
    """Tell the ranks of the axis of overflows in the gradients that are there, if float16 autocast is on."""
    found = list(parameters())
    if axis.size > 1 and found and _scales(found[0].device.type):
        _share(found, axis)


def share_overflow(loss: Tensor, parameters: Callable[[], Iterable[Tensor]], axis: Axis) -> None:
    """Arrange it for the backward passes of ``loss``, if float16 autocast is on and the axis has several ranks."""
    device = loss.device.type
    if axis.size == 1 or not loss.requires_grad:
        return
    if not _scales(device):
        return
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def when_backward_begins(grad: Tensor) -> None:
        # Queued twice: DDP, too, does its last sums in such a callback, and ours has to come after it.
        queue(lambda: queue(lambda: _share(list(parameters()), axis)))

    loss.register_hook(when_backward_begins)


def _scales(device: str) -> bool:
    """Whether gradients may overflow, so that a ``GradScaler`` is likely at work."""
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16


def _share(parameters: list[Tensor], axis: Axis) -> None:
    grads = [param.grad for param in parameters if param.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    local = [grad for grad in local if grad.numel()]
    if not local:
        return
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(local, float("inf"))])
    overflow = (~torch.isfinite(norms).all()).float()
    all_reduce(axis, overflow, op=dist.ReduceOp.MAX)
    # Without a condition, so that the device need not be waited for: 0 is added where nothing overflowed.
    local[0].view(-1)[:1].add_(torch.where(overflow > 0, float("inf"), 0.0).to(local[0].dtype))
