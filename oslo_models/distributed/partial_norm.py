"""Norms of shards, computed by code outside this library. Reading a value reduces it over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis, ParallelMesh


class PartialNorm(Tensor):
    """Norms of local shards over the elements that count on this rank. Use as a number triggers the reduction.

    ``torch.nn.utils.get_total_norm`` stacks norms and takes the norm of the stack. This pattern costs one reduction
    over all ranks of the model. Any other use reduces each norm over the tensor-parallel group.
    """

    mesh: ParallelMesh
    order: float
    of_gradient: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0][0] if func is torch.stack else args[0]
        if func is torch.stack:
            first = next(part for part in args[0] if isinstance(part, cls))
            parts = [part if isinstance(part, cls) else first._counted_once(part) for part in args[0]]
            with torch._C.DisableTorchFunctionSubclass():
                return first._like(torch.stack(parts, *args[1:], **kwargs))
        if func in _MOVES and isinstance(first, cls):
            with torch._C.DisableTorchFunctionSubclass():
                return first._like(func(*args, **kwargs))
        if func is torch.linalg.vector_norm and isinstance(first, cls) and first.dim():
            with torch._C.DisableTorchFunctionSubclass():
                local = torch.linalg.vector_norm(first.as_subclass(Tensor), *args[1:], **kwargs)
            return first._reduced(local, first.mesh.weights)
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(cls, PartialNorm._resolved, (args, kwargs))
        return func(*args, **kwargs)

    def _like(self, values: Tensor) -> PartialNorm:
        return partial_norm(values, self.mesh, self.order, self.of_gradient)

    def _counted_once(self, norm: Tensor) -> Tensor:
        """Return the norm of a replicated tensor on tensor-parallel rank 0 and zero elsewhere: it counts once."""
        return norm if self.mesh.tp.rank == 0 else torch.zeros_like(norm)

    def _resolved(self) -> Tensor:
        if self.of_gradient and self.mesh.pp.size > 1:
            raise RuntimeError(
                "the norm of a gradient, or of a tied weight that counts on another stage, was used as a number on one "
                "pipeline stage: a sum of such norms would lack the other stages. Use model.clip_grad_norm_(...) or "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), ...), which return the norm of the full model on "
                "every stage, or take the norm of full_tensor()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            local = self.as_subclass(Tensor)
        return self._reduced(local, self.mesh.tp)

    def _reduced(self, local: Tensor, axis: Any) -> Tensor:
        return norm_of_parts(axis, local, self.order)


def norm_of_parts(axis: Axis, local: Tensor, order: float) -> Tensor:
    """All-reduce the norms of local shards to the norm of the full tensor. A collective of the axis."""
    local = local.detach().clone()
    if order == float("inf"):
        return all_reduce(axis, local, op=dist.ReduceOp.MAX)
    return all_reduce(axis, local.pow_(order)).pow_(1.0 / order)


def partial_norm(values: Tensor, mesh: ParallelMesh, order: float, of_gradient: bool) -> PartialNorm:
    result: Any = values.as_subclass(PartialNorm)
    result.mesh, result.order, result.of_gradient = mesh, order, of_gradient
    return cast(PartialNorm, result)


_QUESTIONS = {Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "device", "dtype", "ndim"))}
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.clone, Tensor.detach}
