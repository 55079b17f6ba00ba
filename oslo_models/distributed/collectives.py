"""Tensor collectives outside autograd: in place, over process groups, shared memory or threads.

Only this file and `object_exchange` call ``torch.distributed``'s collectives. See `autograd_collectives` for
collectives with a backward pass. An axis of size one returns early.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_kernels.shared_memory import DTYPES
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.shared_memory import shared_memory_of
from oslo_models.distributed.watchdog import waiting

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def all_reduce(axis: Axis, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """All-reduce ``x`` over the axis in place and return it."""
    if axis.size == 1:
        return x
    if torch.compiler.is_compiling():  # becomes a node of the graph
        memory = axis.symmetric_memory
        if memory is not None and op is SUM and memory.takes(x):
            return x.copy_(_symmetric_sum_op(x, memory.axis))
        dist.all_reduce(x, op=op, group=axis.group)
        return x
    # Hot path of every sharded layer in decoding. A call takes a few microseconds, mostly in Python.
    if x.is_cpu and x.dtype in DTYPES and (op is SUM or op in (SUM, MAX)) and (memory := shared_memory_of(axis)):
        if x.is_contiguous():
            return memory.all_reduce(x, op is not SUM and op == MAX)
        return x.copy_(memory.all_reduce(x.contiguous(), op is not SUM and op == MAX))
    if axis.threads is not None:
        axis.threads.all_reduce(axis.rank, x, op)
        return x
    _communicate(axis, "a sum", dist.all_reduce, x, op=op)
    return x


@dataclass
class PendingSum:
    """Pending all-reduce over the axis. `wait` returns its result."""

    x: Tensor
    axis: Axis
    work: Any = None

    def wait(self) -> Tensor:
        """Return the sum. On a GPU, the current stream waits for it, not this process."""
        if self.work is not None:
            with waiting(self.axis, "a sum"):
                _queue(self.axis, "a sum", self.x, self.work.wait)
        return self.x


def start_all_reduce(axis: Axis, x: Tensor) -> PendingSum:
    """Start to all-reduce a temporary in place. It must stay unchanged until `PendingSum.wait`."""
    if axis.size == 1 or axis.threads is not None or (x.is_cpu and shared_memory_of(axis)):
        return PendingSum(all_reduce(axis, x), axis)  # already complete
    with waiting(axis, "a sum"):
        work = dist.all_reduce(x, op=SUM, group=axis.group, async_op=True)
    return PendingSum(x, axis, work)


def reduce_scatter(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Sum ``x`` over the axis and return this rank's part of the sum along ``dim``.

    Backends require equal shapes, so smaller parts are padded for the transfer. Shared memory does not need it.

    Args:
        x: a tensor of the same shape on every rank.
        dim: a dimension, not negative.
        sizes: the size of each rank's part along ``dim``.
    """
    if axis.size == 1:
        return x
    if has_dispatch_mode():
        return _reduce_scatter_op(x, axis_handle(axis), dim, sizes)
    if axis.threads is not None:
        return axis.threads.reduce_scatter(axis.rank, x, dim, sizes)
    shape = (*x.shape[:dim], sizes[axis.rank], *x.shape[dim + 1 :])
    parts = x.split(list(sizes), dim)
    if x.is_cpu and x.dtype in DTYPES and (memory := shared_memory_of(axis)):
        is_flat = x.shape[:dim].numel() == 1
        flat = x.reshape(-1) if is_flat else torch.cat([part.reshape(-1) for part in parts])
        return memory.reduce_scatter(flat, [part.numel() for part in parts], x.new_empty(shape))
    padded = x.new_zeros(len(sizes), *x.shape[:dim], max(sizes), *x.shape[dim + 1 :])
    for target, part in zip(padded.unbind(), parts, strict=True):
        target.narrow(dim, 0, part.shape[dim]).copy_(part)
    own = torch.empty_like(padded[0])
    _communicate(axis, "a reduce-scatter", dist.reduce_scatter_tensor, own, padded.flatten(0, 1))
    return own if own.shape == shape else own.narrow(dim, 0, sizes[axis.rank]).clone()


def all_gather(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the shards of all ranks along ``dim``.

    Backends require equal shapes, so smaller shards are padded for the transfer.

    Args:
        dim: a dimension, not negative.
        sizes: the size of each rank's shard along ``dim``.
    """
    if has_dispatch_mode():
        return _all_gather_op(x, axis_handle(axis), dim, sizes)
    largest = max(sizes)
    if sizes[axis.rank] < largest:
        padding = x.new_zeros(*x.shape[:dim], largest - sizes[axis.rank], *x.shape[dim + 1 :])
        x = torch.cat((x, padding), dim)
    if torch.compiler.is_compiling():
        gathered = x.new_empty((len(sizes) * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=axis.group)
        padded = zip(gathered.chunk(len(sizes)), sizes, strict=True)
        return torch.cat([shard.narrow(dim, 0, size) for shard, size in padded], dim)
    if x.is_cpu and (memory := shared_memory_of(axis)):
        shards = memory.all_gather(x.contiguous()).unbind()
    elif axis.threads is not None:
        shards = tuple(axis.threads.all_gather(axis.rank, x))
    else:
        shards = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for _ in sizes)
        _communicate(axis, "a concatenation", dist.all_gather, list(shards), x.contiguous())
    return torch.cat([shard.narrow(dim, 0, size) for shard, size in zip(shards, sizes, strict=True)], dim)


def all_to_all(axis: Axis, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Exchange rows of ``x`` with all ranks of the axis. Return the received rows in rank order.

    Args:
        x: ``[sum(sent), ...]``, in the order of the destination ranks.
        sent: the number of rows for each rank.
        received: the number of rows from each rank.
    """
    out = x.new_empty(sum(received), *x.shape[1:])
    width = torch.Size(x.shape[1:]).numel()
    # Send bytes, since not all backends support all dtypes.
    as_bytes = [each.contiguous().view(len(each), width).view(torch.uint8) for each in (out, x)]
    _communicate(
        axis,
        "an exchange of tokens",
        dist.all_to_all_single,
        *as_bytes,
        output_split_sizes=list(received),
        input_split_sizes=list(sent),
    )
    return out


def _communicate(axis: Axis, what: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a collective of torch. With NCCL, the synchronous form only queues it on the current stream."""
    x = args[0] if isinstance(args[0], Tensor) else args[0][0]
    with waiting(axis, what):
        _queue(axis, what, x, partial(collective, *args, **kwargs, group=axis.group))


def _queue(axis: Axis, what: str, x: Tensor, call: Callable[[], Any]) -> None:
    """Call a function that waits for a collective. On a GPU only the current stream waits, so watch it from then on.

    A capture runs nothing. `InFlight.replay` watches the replays of the graph.
    """
    if not x.is_cuda or axis.watchdog is None or torch.cuda.is_current_stream_capturing():
        call()
    else:
        axis.watchdog.in_flight.queue(axis, what, x.device, call)


# Collectives as operations: for activation checkpointing, which can keep them, and for compilers --------------------


def has_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode`` is active. It may keep any result, so no result may be modified in place.

    Selective activation checkpointing is such a mode. It keeps an alias of the result. If the result is viewed in
    between, the alias has a separate version counter, and torch would not detect a later modification.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def reduce_fresh(axis: Axis, x: Tensor, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """All-reduce a temporary without other readers over the axis: in place, unless a dispatch mode is active.

    Under such a mode the all-reduce is one operation without side effects, ``torch.ops.oslo.all_reduce``. A
    checkpointing policy may keep its result, so that the backward pass does not communicate again.
    """
    if axis.size > 1 and has_dispatch_mode():
        return _all_reduce_op(x, axis_handle(axis), op == MAX)
    return all_reduce(axis, x, op)


_AXES: weakref.WeakValueDictionary[int, Axis] = weakref.WeakValueDictionary()


def axis_handle(axis: Axis) -> int:
    """Return an integer handle of the axis, since arguments of a custom operation cannot be Python objects."""
    _AXES[axis.number] = axis
    return axis.number


def axis_of_handle(handle: int) -> Axis:
    """Return the axis of a handle."""
    return _AXES[handle]


# No dispatch mode is active inside the kernel of an operation, so these do not recurse.


@torch.library.custom_op("oslo::all_reduce", mutates_args=())
def _all_reduce_op(x: Tensor, axis: int, maximum: bool) -> Tensor:
    return all_reduce(axis_of_handle(axis), x.clone(memory_format=torch.contiguous_format), MAX if maximum else SUM)


@_all_reduce_op.register_fake
def _(x: Tensor, axis: int, maximum: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("oslo::all_gather", mutates_args=())
def _all_gather_op(x: Tensor, axis: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return all_gather(axis_of_handle(axis), x, dim, sizes)


@_all_gather_op.register_fake
def _(x: Tensor, axis: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])


@torch.library.custom_op("oslo::reduce_scatter", mutates_args=())
def _reduce_scatter_op(x: Tensor, axis: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return reduce_scatter(axis_of_handle(axis), x, dim, sizes)


@_reduce_scatter_op.register_fake
def _(x: Tensor, axis: int, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:dim], sizes[axis_of_handle(axis).rank], *x.shape[dim + 1 :])


@torch.library.custom_op("oslo::symmetric_sum", mutates_args=())
def _symmetric_sum_op(x: Tensor, axis: int) -> Tensor:
    summed: Tensor = axis_of_handle(axis).symmetric_memory.sum(x.contiguous())
    return summed


@_symmetric_sum_op.register_fake
def _(x: Tensor, axis: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# From one rank to others ----------------------------------------------------------------------------------------------


def broadcast(axis: Axis, x: Tensor, src: int = 0) -> Tensor:
    """Broadcast ``x`` from position ``src`` on the axis, in place, and return it."""
    if axis.size > 1:
        _communicate(axis, "a broadcast", dist.broadcast, x, src=axis.ranks[src])
    return x


def send(axis: Axis, x: Tensor, dst: int, slow: bool = False) -> None:
    """Send a contiguous tensor to position ``dst`` on the axis.

    Args:
        slow: the receiver may be busy with files. Wait as long as it is alive. Sender and receiver pass the same value.
    """
    pair = _pair_axis(axis, axis.rank, dst) if slow else axis
    with waiting(pair, "a send", None if slow else dst, slow):
        _queue(axis, "a send", x, partial(dist.send, x, axis.ranks[dst], group=axis.group))


def receive(axis: Axis, x: Tensor, src: int, slow: bool = False) -> Tensor:
    """Receive a tensor from position ``src`` on the axis into the contiguous tensor ``x`` and return it.

    Args:
        slow: see `send`.
    """
    pair = _pair_axis(axis, src, axis.rank) if slow else axis
    with waiting(pair, "a receive", None if slow else src, slow):
        _queue(axis, "a receive", x, partial(dist.recv, x, axis.ranks[src], group=axis.group))
    return x


def _pair_axis(axis: Axis, src: int, dst: int) -> Axis:
    """Return an axis of only the sender and the receiver, on which they wait for each other."""
    rank, ranks = int(axis.rank == dst), (axis.ranks[src], axis.ranks[dst])
    return replace(axis, name=f"{axis.name} to {axis.ranks[dst]}", rank=rank, ranks=ranks)


@dataclass
class PendingMessage:
    """Pending send or receive of a contiguous tensor. Keep this object until `wait` has returned.

    Attributes:
        x: the sent tensor, or the tensor that receives.
        peer: the position on the axis of the other rank.
        what: a description for errors: ``"a send"``.
    """

    work: dist.Work
    x: Tensor
    axis: Axis
    peer: int
    what: str

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> Tensor:
        """Wait for the message and return the tensor. On a GPU, the current stream waits, not this process."""
        with waiting(self.axis, self.what, self.peer):
            _queue(self.axis, self.what, self.x, self.work.wait)
        return self.x


def start_send(axis: Axis, x: Tensor, dst: int) -> PendingMessage:
    """Start to send a contiguous tensor to position ``dst`` on the axis, without waiting for its arrival."""
    return _start_message(axis, "a send", dist.isend, x, dst)


def start_receive(axis: Axis, x: Tensor, src: int) -> PendingMessage:
    """Start to receive a tensor from position ``src`` on the axis into the contiguous tensor ``x``.

    Messages of one sender arrive in the order in which their receives are started.
    """
    return _start_message(axis, "a receive", dist.irecv, x, src)


def _start_message(axis: Axis, what: str, message: Callable[..., Any], x: Tensor, peer: int) -> PendingMessage:
    call = partial(message, x, axis.ranks[peer], group=axis.group)
    if x.is_cuda and axis.watchdog is not None:  # NCCL connects a pair of ranks in their first message
        call = partial(axis.watchdog.in_flight.connect, axis, what, call)
    with waiting(axis, what, peer):
        work = call()
    assert work is not None
    return PendingMessage(work, x, axis, peer, what)
