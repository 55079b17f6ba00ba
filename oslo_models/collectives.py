"""What ranks say to each other: Megatron's conjugate pairs as autograd functions, and agreement between ranks.

The only file that calls ``torch.distributed``'s collectives. An axis of size one returns early, here and nowhere else.
Source of the pairs: Shoeybi et al., "Megatron-LM", 2019, figure 3 (``f`` is `copy_to`, ``g`` is `reduce_from`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.mesh import Axis


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.detach()  # no view: a view would keep its base alive, which remembers it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The engine may hand the same gradient to others, so it is not summed in place.
        return all_reduce(ctx.axis, grad.clone(memory_format=torch.contiguous_format)), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(axis, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.dim, ctx.start, ctx.size = dim, sum(sizes[: axis.rank]), sizes[axis.rank]
        return _all_gather(axis, x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.size).contiguous(), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather(ctx.axis, grad, ctx.dim, ctx.sizes), None, None, None


def all_reduce(axis: Axis, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over the axis, in place and outside autograd; returns ``x``."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def copy_to(axis: Axis, x: Tensor) -> Tensor:
    """Hand a replicated tensor to divided layers: identity forward, sum of the gradients over the axis backward.

    Siblings that read the same tensor (query, key and value; attention and MLP of a parallel residual; the
    cross-attentions of all decoder blocks) share one copy, so that their gradients are added up locally and summed
    over the axis once. The copy is remembered on the tensor, unless that is a leaf: its graph would keep it alive.
    """
    if axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if torch.compiler.is_compiling():
        return _CopyTo.apply(x, axis)
    if x.is_leaf:
        return _CopyTo.apply(x, axis)
    remembered: tuple[Tensor, Axis, int] | None = getattr(x, "_oslo_copy", None)
    if remembered is not None and remembered[1] is axis and remembered[2] == x._version:
        return remembered[0]
    copy = _CopyTo.apply(x, axis)
    x._oslo_copy = (copy, axis, x._version)  # type: ignore[attr-defined]
    return copy


def reduce_from(axis: Axis, x: Tensor) -> Tensor:
    """Sum partial results over the axis forward (in place), identity backward. ``x`` must be a fresh result."""
    if axis.size == 1:
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        return all_reduce(axis, x)
    return _ReduceFrom.apply(x, axis)


def gather_from(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the parts of all ranks along ``dim`` forward; take the own part of the gradient backward.

    Args:
        sizes: the size of each rank's part; they may differ.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim % x.dim(), sizes)


def scatter_to(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Take the own part of a replicated tensor forward; concatenate the gradients of all ranks backward."""
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dim % x.dim(), sizes)


def _all_gather(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """All-gather with parts of different sizes: shorter ones travel padded, since backends want equal shapes."""
    largest = max(sizes)
    if sizes[axis.rank] < largest:
        padding = x.new_zeros(*x.shape[:dim], largest - sizes[axis.rank], *x.shape[dim + 1 :])
        x = torch.cat((x, padding), dim)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in sizes]
    dist.all_gather(parts, x.contiguous(), group=axis.group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def broadcast(axis: Axis, x: Tensor, src: int = 0) -> Tensor:
    """Overwrite ``x`` with that of position ``src`` on the axis; returns ``x``."""
    if axis.size > 1:
        dist.broadcast(x, src=axis.ranks[src], group=axis.group)
    return x


def send(axis: Axis, x: Tensor, dst: int) -> None:
    """Send a contiguous tensor to position ``dst`` on the axis."""
    dist.send(x, axis.ranks[dst], group=axis.group)


def post_send(axis: Axis, x: Tensor, dst: int) -> tuple[dist.Work, Tensor]:
    """Begin to send a contiguous tensor; keep what is returned until its ``[0].wait()`` has been called."""
    work = dist.isend(x, axis.ranks[dst], group=axis.group)
    assert work is not None
    return work, x


def receive(axis: Axis, x: Tensor, src: int) -> Tensor:
    """Fill the contiguous tensor ``x`` with what position ``src`` on the axis sends; returns ``x``."""
    dist.recv(x, axis.ranks[src], group=axis.group)
    return x


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        dist.barrier(group=axis.group)


def gather_objects(axis: Axis, value: Any) -> list[Any]:
    """What every rank of the axis passed, in the order of the axis. Values are pickled: keep them small."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    return values


def broadcast_object(axis: Axis, value: Any, src: int = 0) -> Any:
    """What position ``src`` of the axis passed."""
    if axis.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=axis.ranks[src], group=axis.group)
    return box[0]


@contextmanager
def agree(axis: Axis, doing: str) -> Iterator[None]:
    """Run the block on every rank; if it raises on any, raise on all, so that nobody waits for a rank that gave up.

    The rank that failed raises its own exception; the others raise one of the same type that names the rank. The block
    must not contain a collective: a rank that raises before it would leave the others waiting in it.

    Args:
        doing: what the block does, for the message: ``"loading /path"``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as exc:  # noqa: BLE001  every failure has to reach the peers
        error = exc
    reports = gather_objects(axis, None if error is None else (_portable(type(error)), str(error)))
    if error is not None:
        raise error
    for rank, report in zip(axis.ranks, reports, strict=True):
        if report is not None:
            raise report[0](f"{doing}: rank {rank} failed: {report[1]}")


def _portable(kind: type[Exception]) -> type[Exception]:
    """The nearest ancestor of an exception type that every rank can build from one message."""
    for ancestor in kind.__mro__:
        try:
            if isinstance(ancestor("message"), Exception):
                return ancestor
        except TypeError:
            continue
    return RuntimeError


def require_equal(axis: Axis, values: Mapping[str, Any], what: str) -> None:
    """Raise ``ValueError`` on every rank, naming keys and values, unless all ranks passed equal values.

    Args:
        values: what has to be equal; compared by ``repr``.
        what: what the values are, for the message: ``"arguments of from_pretrained_with_parallel"``.
    """
    texts = gather_objects(axis, {key: repr(value) for key, value in values.items()})
    keys = {key: None for text in texts for key in text}
    lines = []
    for key in keys:
        seen = [text.get(key, "(not given)") for text in texts]
        if len(set(seen)) > 1:
            lines.append(f"{key}: " + ", ".join(f"rank {r} has {v}" for r, v in zip(axis.ranks, seen, strict=True)))
    if lines:
        raise ValueError(f"ranks were given different {what}:\n  " + "\n  ".join(lines))
