"""Mixers of divided tokens: each rank computes some heads or channels of a recurrence or convolution for all tokens.

The ranks divide a mixer like the ranks of tensor parallelism with sequence parallelism (`token_parts`), with slices of
the whole weights. Projections gather the tokens, and the output projection reduce-scatters its sum. The gradient of a
weight is zero outside of the slice, and the block sums up the gradients of all ranks (`context_parts`).

With tensor parallelism, the ranks divide the heads of each tensor-parallel rank. Norms and inner projections then sum
over the ranks of both axes (`ParallelMesh.tp_cp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.context_parts import ContextPart, ContextParts
from oslo_models.layers.kinds import ShardedModule, ShardingContext, own_class, shard_module
from oslo_models.layers.norm import HeadNorm
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.layers.token_division import TOKENS, hidden_states_of, with_hidden_states
from oslo_models.layers.token_region import WeightSource
from oslo_models.sharding.entry import Entries, Replicated, entry_of
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.shares import NestedRanks, Range


class SliceLayout(Layout):
    """Layout of slices of a weight. The gradients of all slices are summed, also of elements in several slices."""

    @property
    def overlaps(self) -> bool:
        return False

    @classmethod
    def of(cls, layout: Layout, n: int) -> SliceLayout:
        """Return a layout of slices over ``n`` ranks. Each rank has all of a replicated tensor."""
        if layout.dim is None and layout.shape:
            return cls(layout.shape, 0, (((0, layout.shape[0]),),) * n)
        return cls(layout.shape, layout.dim, layout.ranges, layout.first_ranges)

    @classmethod
    def within(cls, held: Layout, rank: int, ranks: Sequence[tuple[Range, ...]]) -> SliceLayout:
        """Return the layout of a shard over ranks.

        Args:
            held: layout of the shard.
            rank: the rank that holds the shard.
            ranks: ranges of the whole weight of each rank that divides the shard. Empty without a sharded dimension.
        """
        shape = held.local_shape(rank)
        if held.dim is None:
            return cls.of(Layout(shape), len(ranks))
        own = held.ranges[rank]
        offsets = [0, *accumulate(stop - start for start, stop in own)]

        def moved(start: int, stop: int) -> Range:
            first, offset = next((a, at) for (a, b), at in zip(own, offsets, strict=False) if a <= start <= stop <= b)
            return start - first + offset, stop - first + offset

        return cls(shape, held.dim, tuple(tuple(moved(*each) for each in ranges) for ranges in ranks))


@dataclass(frozen=True)
class _SlicingContext(ShardingContext):
    """Surroundings of a module whose weights are sliced over the ranks of another axis.

    Attributes:
        model: the module around the module, since the slices are in no model.
    """

    axis: Axis

    @property
    def parent(self) -> nn.Module:
        return self.model

    @property
    def tp(self) -> Axis:
        return self.axis


class MixerDivision:
    """How the ranks of the cp axis divide one mixer, or the heads of one mixer on each tensor-parallel rank.

    Attributes:
        parts: state of the model's parts.
    """

    def __init__(
        self,
        mixer: nn.Module,
        name: str,
        entries: Entries,
        layouts: Mapping[str, Layout],
        mesh: ParallelMesh,
        parts: ContextParts,
    ) -> None:
        """Divide a mixer. With new axes, this is a collective of all ranks.

        Args:
            name: path of the mixer in its model.
            entries: entries of the model, by paths in the model.
            layouts: layouts of the parameters over the tp axis, by paths in the model.
            mesh: mesh of the model.

        Raises:
            ValueError: there are more ranks than heads.
        """
        self.parts, self._name, self._mesh = parts, name, mesh
        self._class = own_class(mixer)
        paths = [_joined(name, path) for path, _ in (*mixer.named_modules(), *mixer.named_parameters())]
        self._entries = {path: entries[path] for path in paths if path in entries}
        self._modules = [path for path, _ in mixer.named_modules() if _joined(name, path) in entries]
        self._held = {path: layouts[path] for path in (_joined(name, leaf) for leaf, _ in mixer.named_parameters())}
        self._require_heads()
        nested = self._nested(parts.axis.size)
        self._shared = {path for path in self._held if mesh.tp.size > 1 and self._is_shared(path)}
        self._axis = mesh.tp_cp
        tp, count = mesh.tp, self._axis.size
        self._layouts: dict[str, Layout] = {path: SliceLayout.of(each, count) for path, each in nested.items()}
        self._slices = {
            path: SliceLayout.within(self._held[path], tp.rank, layout.ranges[tp.rank :: tp.size])
            for path, layout in self._layouts.items()
        }

    def _nested(self, n: int) -> dict[str, Layout]:
        """Return the layouts over ``n`` ranks for each tensor-parallel rank."""
        ranks, found = NestedRanks(self._mesh.tp.size, n), {}
        for path, held in self._held.items():
            found[path] = self._entry_of(path).layout(path.rpartition(".")[2], held.shape, ranks)
        return found

    def _entry_of(self, path: str) -> Replicated:
        key = entry_of(path, self._entries)
        assert key is not None, path
        return self._entries[key]

    def _is_shared(self, path: str) -> bool:
        """Return whether several tensor-parallel ranks apply elements of a parameter to different heads."""
        held = self._held[path]
        return held.overlaps if held.dim is not None else isinstance(self._entry_of(path), HeadNorm)

    def _require_heads(self) -> None:
        """Raise ``ValueError`` if a rank has no heads."""
        tp, size = self._mesh.tp.size, self.parts.axis.size

        def fits(n: int) -> bool:
            layouts = self._nested(n).values()
            return all(min(layout.local_shape(rank), default=1) for layout in layouts for rank in range(tp * n))

        limit = next(n for n in range(size, 0, -1) if n == 1 or fits(n))
        if limit < size:
            kind = self._class.__name__
            heads = f"{limit} heads of each {kind}" + (f" on a rank of tensor_parallel_size={tp}" if tp > 1 else "")
            remedy = f"use 1 to {limit}" + (" or a smaller tensor_parallel_size" if tp > 1 else "")
            raise ValueError(f"{self.parts.option} is more than the {heads}, which ranks divide: {remedy}")

    def fits(self, mixer: nn.Module) -> bool:
        """Return whether the parameters of a mixer are those of the plan. Adapters may have added others."""
        return self._layouts.keys() == {_joined(self._name, path) for path, _ in mixer.named_parameters()}

    def entered(self, hidden: ContextPart) -> ContextPart:
        """Return hidden states for the local heads. Their gradient is summed over the tensor-parallel ranks."""
        return hidden.with_local(copy_to(self._mesh.tp, hidden.local()))

    def local_mixer(self, mixer: nn.Module) -> nn.Module:
        """Return this rank's heads or channels of a mixer, with slices of its current weights."""
        local = self._copied(mixer, "")
        modules = dict(local.named_modules())
        for path in self._modules:
            full, module = _joined(self._name, path), modules[path]
            shards = {leaf: self._layouts[_joined(full, leaf)] for leaf, _ in module.named_parameters(recurse=False)}
            parent = modules[path.rpartition(".")[0]]
            context = _SlicingContext(full, parent, self._mesh, None, shards, self._layouts, self._axis)
            shard_module(module, self._entries[full], context)
            if isinstance(module, ShardedModule) and module.returns_parts:
                module.token_parts = self.parts
        return local

    def _copied(self, module: nn.Module, path: str) -> nn.Module:
        """Return a module with the attributes of another one, and slices of its parameters."""
        made: nn.Module = object.__new__(own_class(module) if path else self._class)
        others = {*module._parameters, "full_attributes"}
        own = {name: value for name, value in vars(module).items() if name not in others}
        own["_parameters"] = {
            leaf: None if param is None else self._slice(getattr(module, leaf), _joined(path, leaf))
            for leaf, param in module._parameters.items()
        }
        own["_modules"] = {
            name: None if child is None else self._copied(child, _joined(path, name))
            for name, child in module._modules.items()
        }
        vars(made).update(own)
        return made

    def _slice(self, whole: Tensor, path: str) -> Tensor:
        path = _joined(self._name, path)
        layout, rank = self._slices[path], self.parts.axis.rank
        with without_override():
            if path in self._shared and whole.requires_grad:
                whole = SumReplicatedGrad.apply(whole, self._mesh.tp, self._held[path])
            local = layout.shard(whole, rank)
            if not local._is_view():
                WeightSource(whole.detach(), partial(layout.shard, rank=rank)).attach(local)
        return local


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


class DividedMixer(nn.Module):
    """Mixin before the class of a mixer: computes this rank's heads or channels for a part of the tokens.

    With states for a cache and with adapters on its layers, each rank computes the whole mixer for all tokens.

    Attributes:
        division: how the ranks divide the mixer.
    """

    division: MixerDivision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_states_of(args, kwargs)
        if not isinstance(hidden, ContextPart):
            return super().forward(*args, **kwargs)
        needs_states = hidden.state.is_prompt and any(isinstance(x, Cache) for x in (*args, *kwargs.values()))
        if not needs_states and self.division.fits(self):
            args, kwargs = with_hidden_states(self.division.entered(hidden), args, kwargs)
            local = self.division.local_mixer(self)
            return type(local).forward(local, *args, **kwargs)  # without the hooks, which this call has
        args, kwargs = with_hidden_states(hidden.full(type(self).__name__), args, kwargs)
        return hidden.with_local(hidden.slice_of(super().forward(*args, **kwargs), TOKENS))
