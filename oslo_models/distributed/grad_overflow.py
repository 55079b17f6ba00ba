"""Makes ``GradScaler`` skip the same steps on all ranks of a model.

With float16 autocast a gradient may overflow on one rank only. The scaler of this rank would skip the step, the other
ranks would take it. Therefore, at the end of a backward pass, an overflow on one rank is written into the gradients of
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import local_tensor


def propagate_overflow(parameters: Callable[[], Iterable[Tensor]], axis: Axis) -> None:
    """Propagate overflows in the current gradients to all ranks of the axis, if float16 autocast is on."""
    found = list(parameters())
    if axis.size > 1 and found and _uses_float16_autocast(found[0].device.type):
        _propagate(found, axis)


def propagate_overflow_after_backward(loss: Tensor, parameters: Callable[[], Iterable[Tensor]], axis: Axis) -> None:
    """Propagate overflows at the end of each backward pass of ``loss``, if float16 autocast is on."""
    device = loss.device.type
    if axis.size == 1 or not loss.requires_grad:
        return
    if not _uses_float16_autocast(device):
        return
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def at_start_of_backward(grad: Tensor) -> None:
        # Queued twice: DDP runs its last all-reduces in such a callback too, and ours has to run later.
        queue(lambda: queue(lambda: _propagate(list(parameters()), axis)))

    loss.register_hook(at_start_of_backward)


def _uses_float16_autocast(device: str) -> bool:
    """Return whether float16 autocast is on: gradients may overflow, and a ``GradScaler`` is likely in use."""
    if device == "meta":  # of a plan: it has no autocast
        return False
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16


def _propagate(parameters: list[Tensor], axis: Axis) -> None:
    grads = [param.grad for param in parameters if param.grad is not None]
    local = [grad.to_local() if isinstance(grad, DTensor) else local_tensor(grad) for grad in grads]
    local = [grad for grad in local if grad.numel()]
    if not local:
        return
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(local, float("inf"))])
    overflow = (~torch.isfinite(norms).all()).float()
    all_reduce(axis, overflow, op=dist.ReduceOp.MAX)
    # Always add (0 without overflow): a condition would synchronise with the device.
    local[0].view(-1)[:1].add_(torch.where(overflow > 0, float("inf"), 0.0).to(local[0].dtype))
