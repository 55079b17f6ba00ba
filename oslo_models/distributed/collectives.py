"""What ranks say to each other: Megatron's conjugate pairs as autograd functions, and agreement between ranks.

The only file that calls ``torch.distributed``'s collectives, and those of ranks that are threads. An axis of size one
returns early, here and nowhere else.
Source of the pairs: Shoeybi et al., "Megatron-LM", 2019, figure 3 (``f`` is `copy_to`, ``g`` is `reduce_from`).
"""

from __future__ import annotations

import pickle
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_kernels.build import BuildError
from oslo_kernels.shared_memory import DTYPES, SharedMemory
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.watchdog import waiting


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.detach()  # no view: a view would keep its base alive, which remembers it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The engine may hand the same gradient to others, so it is not summed in place.
        return reduce_fresh(ctx.axis, grad.clone(memory_format=torch.contiguous_format)), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        if not observed():
            ctx.mark_dirty(x)
        return reduce_fresh(axis, x)

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


SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def all_reduce(axis: Axis, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce ``x`` over the axis, in place and outside autograd; returns ``x``."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():  # becomes an operation of the graph
        dist.all_reduce(x, op=op, group=axis.group)
        return x
    # the way of every layer of a model that decodes: a few microseconds, most of them in Python
    if x.is_cpu and x.dtype in DTYPES and (op is SUM or op in (SUM, MAX)) and (memory := _shared_memory(axis)):
        if x.is_contiguous():
            return memory.all_reduce(x, op is not SUM and op == MAX)
        return x.copy_(memory.all_reduce(x.contiguous(), op is not SUM and op == MAX))
    if axis.threads is not None:
        axis.threads.all_reduce(axis.rank, x, op)
        return x
    with waiting(axis, "a sum"):
        dist.all_reduce(x, op=op, group=axis.group)
    return x


def observed() -> bool:
    """Whether a dispatch mode sees every operation and may keep its result: then no result may be changed in place.

    Selective activation checkpointing is such a mode. What it keeps is an alias of the result, with a version counter
    of its own where the result is viewed in between, so that torch does not notice a later change.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def reduce_fresh(axis: Axis, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce a result that nobody else reads over the axis, outside autograd: in its memory unless it is `observed`.

    Then the reduction is one operation without side effects, ``torch.ops.oslo.all_reduce``, which a checkpointing
    policy may keep, so that nothing is sent again in the backward pass.
    """
    if axis.size > 1 and observed():
        return _all_reduce_op(x, _number(axis), op == MAX)
    return all_reduce(axis, x, op)


_AXES: weakref.WeakValueDictionary[int, Axis] = weakref.WeakValueDictionary()


def _number(axis: Axis) -> int:
    """What stands for an axis among the arguments of an operation, which cannot be objects."""
    _AXES[id(axis)] = axis
    return id(axis)


# In the kernel of an operation no mode is active any more: what happens there is not observed.


@torch.library.custom_op("oslo::all_reduce", mutates_args=())
def _all_reduce_op(x: Tensor, axis: int, maximum: bool) -> Tensor:
    return all_reduce(_AXES[axis], x.clone(memory_format=torch.contiguous_format), MAX if maximum else SUM)


@_all_reduce_op.register_fake
def _(x: Tensor, axis: int, maximum: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("oslo::all_gather", mutates_args=())
def _all_gather_op(x: Tensor, axis: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return _all_gather(_AXES[axis], x, dim, sizes)


@_all_gather_op.register_fake
def _(x: Tensor, axis: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])


def _shared_memory(axis: Axis) -> SharedMemory | None:
    """What the ranks of the axis exchange tensors through if they can share memory; made when first asked for."""
    known = axis.__dict__
    if "memory" not in known:
        known["memory"] = _share_memory(axis)
    memory: SharedMemory | None = known["memory"]
    return memory


@contextmanager
def _or_gloo() -> Iterator[None]:
    """Ranks on several hosts cannot share memory, which is no fault; what keeps ranks of one host from it is told."""
    try:
        yield
    except (FileNotFoundError, PermissionError):  # the process of that number, if there is one, is not that rank
        pass
    except (BuildError, OSError) as error:
        warnings.warn(f"ranks sum through gloo, which is slower than the memory they share: {error}", stacklevel=2)


def _share_memory(axis: Axis) -> SharedMemory | None:
    """Memory of this host that all ranks of the axis share; ``None`` on all of them when that cannot be."""
    if axis.threads is not None:
        return None
    memory, address = None, None
    with _or_gloo():
        if axis.rank == 0:
            memory, address = SharedMemory.create(axis.size)
    address = broadcast_object(axis, address)
    with _or_gloo():
        if axis.rank > 0 and address is not None:
            memory = SharedMemory.attach(address, axis.rank, axis.size)
    if not all(gather_objects(axis, memory is not None)) or memory is None:
        return None
    memory.timeout = axis.timeout
    memory.waiting = partial(waiting, replace(axis))  # a copy: the axis keeps the memory, which ends with it
    return memory


def copy_to(axis: Axis, x: Tensor) -> Tensor:
    """Hand a replicated tensor to divided layers: identity forward, sum of the gradients over the axis backward.

    Siblings that read the same tensor (query, key and value; attention and MLP of a parallel residual; the
    cross-attentions of all decoder blocks) share one copy, so that their gradients are added up locally and summed
    over the axis once. The copy is remembered on the tensor, unless that is a leaf: its graph would keep it alive.
    """
    if axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if torch.compiler.is_compiling() or x.is_leaf:
        return _CopyTo.apply(x, axis)
    remembered: tuple[Tensor, Axis, int] | None = getattr(x, "_oslo_copy", None)
    if remembered is not None and remembered[1] is axis and remembered[2] == x._version:
        return remembered[0]
    copy = _CopyTo.apply(x, axis)
    x._oslo_copy = (copy, axis, x._version)  # type: ignore[attr-defined]
    return copy


def reduce_from(axis: Axis, x: Tensor) -> Tensor:
    """Sum partial results over the axis forward, identity backward.

    Args:
        x: a fresh result that nobody else reads: the sum takes its memory.
    """
    if axis.size == 1:
        return x
    if not torch.is_grad_enabled():  # nothing is kept for a backward pass, and a token is not to wait for the question
        return all_reduce(axis, x)
    if not x.requires_grad:
        return reduce_fresh(axis, x)
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
    if observed():
        return _all_gather_op(x, _number(axis), dim, sizes)
    largest = max(sizes)
    if sizes[axis.rank] < largest:
        padding = x.new_zeros(*x.shape[:dim], largest - sizes[axis.rank], *x.shape[dim + 1 :])
        x = torch.cat((x, padding), dim)
    if torch.compiler.is_compiling():
        gathered = x.new_empty((len(sizes) * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=axis.group)
        split = zip(gathered.chunk(len(sizes)), sizes, strict=True)
        return torch.cat([part.narrow(dim, 0, size) for part, size in split], dim)
    if x.is_cpu and (memory := _shared_memory(axis)):
        parts = memory.all_gather(x.contiguous()).unbind()
    elif axis.threads is not None:
        parts = tuple(axis.threads.all_gather(axis.rank, x))
    else:
        parts = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in sizes)
        with waiting(axis, "a concatenation"):
            dist.all_gather(list(parts), x.contiguous(), group=axis.group)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def broadcast(axis: Axis, x: Tensor, src: int = 0) -> Tensor:
    """Overwrite ``x`` with that of position ``src`` on the axis; returns ``x``."""
    if axis.size > 1:
        with waiting(axis, "a broadcast"):
            dist.broadcast(x, src=axis.ranks[src], group=axis.group)
    return x


def send(axis: Axis, x: Tensor, dst: int, long: bool = False) -> None:
    """Send a contiguous tensor to position ``dst`` on the axis.

    Args:
        long: wait for the other however long it reads or writes files, as long as it lives; there too.
    """
    pair = _pair(axis, axis.rank, dst) if long else axis
    with waiting(pair, "a send", None if long else dst, long):
        dist.send(x, axis.ranks[dst], group=axis.group)


def _pair(axis: Axis, src: int, dst: int) -> Axis:
    """Two ranks of an axis, one of which sends to the other."""
    rank, ranks = int(axis.rank == dst), (axis.ranks[src], axis.ranks[dst])
    return replace(axis, name=f"{axis.name} to {axis.ranks[dst]}", rank=rank, ranks=ranks)


@dataclass
class Sending:
    """A contiguous tensor on its way to position ``dst``; keep it until `wait` has been called."""

    work: dist.Work
    x: Tensor
    axis: Axis
    dst: int

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        with waiting(self.axis, "a send", self.dst):
            self.work.wait()


def post_send(axis: Axis, x: Tensor, dst: int) -> Sending:
    """Begin to send a contiguous tensor to position ``dst`` on the axis."""
    with waiting(axis, "a send", dst):
        work = dist.isend(x, axis.ranks[dst], group=axis.group)
    assert work is not None
    return Sending(work, x, axis, dst)


def receive(axis: Axis, x: Tensor, src: int, long: bool = False) -> Tensor:
    """Fill the contiguous tensor ``x`` with what position ``src`` on the axis sends; returns ``x``."""
    pair = _pair(axis, src, axis.rank) if long else axis
    with waiting(pair, "a receive", None if long else src, long):
        dist.recv(x, axis.ranks[src], group=axis.group)
    return x


def gather_objects(axis: Axis, value: Any) -> list[Any]:
    """What every rank of the axis passed, in the order of the axis. Values are pickled: keep them small.

    Ranks that load or save get here at different times, so those that are alive are waited for longer than in a step.
    """
    if axis.size == 1:
        return [value]
    if axis.threads is not None:
        return axis.threads.all_gather(axis.rank, value)
    on_cpu = "cpu:" in dist.get_backend_config(axis.group)
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    data = data if on_cpu else data.cuda()
    with waiting(axis, "an exchange", long=True):
        sizes = torch.cat(_exchange(axis, data.new_tensor([len(data)], dtype=torch.int64))).tolist()
        padded = torch.cat((data, data.new_zeros(max(sizes) - len(data))))
        parts = _exchange(axis, padded)
    return [pickle.loads(part[:size].cpu().numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]


def _exchange(axis: Axis, x: Tensor) -> list[Tensor]:
    """All-gather within the timeout of the axis, which the group of the world does not have."""
    parts = [torch.empty_like(x) for _ in axis.ranks]
    assert axis.group is not None
    axis.group.allgather(parts, x, timedelta(seconds=axis.timeout)).wait()
    return parts


def broadcast_object(axis: Axis, value: Any, src: int = 0) -> Any:
    """What position ``src`` of the axis passed."""
    return gather_objects(axis, value if axis.rank == src else None)[src]


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
