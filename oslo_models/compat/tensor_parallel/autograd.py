"""Calls the parts of all threads as one module, which is one autograd node."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers.cache_utils import Cache

from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.layers.full_weights import model_code


class ThreadShards(nn.Module):
    """The parts of one module. Its ``forward`` keeps their signature, because ``generate`` inspects it."""

    def __init__(self, parts: Sequence[nn.Module], threads: ThreadGroup, output_device: torch.device) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        call = partial(run_on_threads, self.parts, threads, output_device)
        self.forward = functools.wraps(parts[0].forward)(call)


def run_on_threads(
    parts: nn.ModuleList, threads: ThreadGroup, output_device: torch.device, /, *args: Any, **kwargs: Any
) -> Any:
    """Call each part with the same arguments. Return the output of rank 0; it is the same on all ranks.

    Raises:
        Exception: the exception of the first part that failed.
    """
    call = _Call(parts, threads, (args, kwargs))
    if torch.is_grad_enabled():
        handle = torch.empty(0, requires_grad=True)  # the node has no parameters as inputs, so it needs another one
        differentiable = iter(_Node.apply(call, handle, *call.inputs))
    else:
        differentiable = iter(call.forward(grad=False))
    leaves, structure = call.output
    leaves = [next(differentiable) if _requires_grad(leaf) else leaf for leaf in leaves]
    output = tree_unflatten(leaves, structure)
    return tree_map_only(Tensor, lambda tensor: tensor.to(output_device), output)


class _Node(torch.autograd.Function):
    """The forward and backward passes of all ranks; each rank has a separate graph.

    Rank 0 runs in the thread of this node. Autograd works for the GPU of rank 0 in this thread only.

    Source: reentrant activation checkpointing in ``torch.utils.checkpoint``, which also calls autograd in its backward.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, handle: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return call.forward(grad=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "parameters of a model that tensor_parallel made get their gradients from loss.backward() only, "
                "without `inputs`, and not from torch.autograd.grad"
            )
        return None, None, *ctx.call.backward(grads)


class _Call:
    """One call of all parts, with the state for its backward pass.

    Attributes:
        inputs: the arguments that require a gradient.
        output: the output of rank 0, flattened, and its structure. Caches in it hold the caches of all ranks.
    """

    output: tuple[list[Any], Any]

    def __init__(self, parts: nn.ModuleList, threads: ThreadGroup, arguments: Any) -> None:
        self._parts, self._threads = parts, threads
        leaves, self._structure = tree_flatten(arguments)
        self.inputs = [leaf for leaf in leaves if torch.is_grad_enabled() and _requires_grad(leaf)]
        # Copy before any rank runs, so that in-place changes to arguments stay local to the rank.
        self._arguments = [[self._of_rank(leaf, rank) for leaf in leaves] for rank in range(threads.size)]
        self._graphs: list[tuple[list[Tensor], list[Tensor]]] = []

    def _of_rank(self, leaf: Any, rank: int) -> Any:
        if isinstance(leaf, Cache):
            return caches_of_ranks(leaf, self._threads.size)[rank]
        if not isinstance(leaf, Tensor):
            return leaf
        own = leaf.detach().to(self._threads.devices[rank], copy=rank > 0)
        return own.requires_grad_(torch.is_grad_enabled() and leaf.requires_grad)

    def forward(self, grad: bool) -> tuple[Tensor, ...]:
        """Call the parts. Return the outputs of rank 0 that require a gradient, detached."""
        arguments, self._arguments = self._arguments, []

        def of_rank(rank: int) -> Any:
            args, kwargs = tree_unflatten(arguments[rank], self._structure)
            with torch.set_grad_enabled(grad), model_code():
                return self._parts[rank](*args, **kwargs)

        flat = [tree_flatten(output) for output in self._threads.run(of_rank)]
        of_ranks = zip(*(leaves for leaves, _ in flat), strict=True)
        self.output = [join_caches(own) if isinstance(own[0], Cache) else own[0] for own in of_ranks], flat[0][1]
        outputs = [[leaf for leaf in leaves if _requires_grad(leaf)] for leaves, _ in flat]
        if grad:
            inputs = [[leaf for leaf in own if _requires_grad(leaf)] for own in arguments]
            self._graphs = list(zip(inputs, outputs, strict=True))
        return tuple(output.detach() for output in outputs[0])

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Backpropagate the same output gradients on each rank. Return the gradients of `inputs`."""
        graphs, self._graphs = self._graphs, []
        if not graphs:
            raise RuntimeError("the graph of this call is gone: one call has one backward pass, without retain_graph")

        def of_rank(rank: int) -> None:
            own = [None if grad is None else grad.to(self._threads.devices[rank]) for grad in grads]
            used = [number for number, grad in enumerate(own) if grad is not None]
            with model_code():  # checkpointed blocks run again
                torch.autograd.backward([graphs[rank][1][number] for number in used], [own[number] for number in used])

        self._threads.run(of_rank)
        own = [x.grad for x in graphs[0][0]]
        return [None if grad is None else grad.to(x.device) for x, grad in zip(self.inputs, own, strict=True)]


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


# Caches ---------------------------------------------------------------------------------------------------------------


class CacheOfRanks(Cache):
    """The cache of rank 0, with the caches of the other ranks. Applies changes by ``generate`` to all of them."""

    others: list[Cache]

    def _all(self, method: str, *args: Any) -> None:
        for cache in self.others:
            getattr(cache, method)(*args)
        getattr(super(), method)(*args)

    def reset(self) -> None:
        self._all("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._all("reorder_cache", beam_idx)

    def crop(self, *args: Any) -> None:
        self._all("crop", *args)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._all("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._all("batch_select_indices", indices)


@functools.cache
def _joined(kind: type[Cache]) -> type[Cache]:
    return type(kind.__name__, (CacheOfRanks, kind), {"__module__": kind.__module__})


def join_caches(caches: Sequence[Any]) -> Cache:
    """Turn the cache of rank 0 into a `CacheOfRanks` for all ranks, in place."""
    first, *others = caches
    if not isinstance(first, CacheOfRanks):
        kind: Any = type(first)
        first.__class__ = _joined(kind)
        first.others = others
    return first


def caches_of_ranks(cache: Any, ranks: int) -> list[Cache]:
    """Return the cache of each rank. An empty cache, as ``generate`` creates it, is copied for each rank.

    Raises:
        ValueError: another model filled the cache.
    """
    if not isinstance(cache, CacheOfRanks):
        if cache.get_seq_length() > 0:
            raise ValueError("the cache was filled by another model: pass an empty one, or one of this model")
        join_caches([cache, *(copy.deepcopy(cache) for _ in range(ranks - 1))])
    return [cache, *cache.others]
