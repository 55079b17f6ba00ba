"""Mixers of divided tokens: each rank computes some heads or channels of a recurrence or convolution for all tokens.

The ranks divide a mixer like the ranks of tensor parallelism with sequence parallelism (`token_parts`), with slices of
the whole weights. Projections gather the tokens, and the output projection reduce-scatters its sum. The gradient of a
weight is zero outside of the slice, and the block sums up the gradients of all ranks (`context_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.context_parts import ContextPart, ContextParts
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shard_module
from oslo_models.layers.token_division import TOKENS, hidden_states_of, with_hidden_states
from oslo_models.layers.token_region import WeightSource
from oslo_models.sharding.entry import Entries, entry_of
from oslo_models.sharding.layout import Layout


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
    """How the ranks of the cp axis divide one mixer.

    Attributes:
        parts: state of the model's parts.
    """

    def __init__(self, mixer: nn.Module, name: str, entries: Entries, mesh: ParallelMesh, parts: ContextParts) -> None:
        """Divide a mixer with whole weights.

        Args:
            name: path of the mixer in its model.
            entries: entries of the model, by paths in the model.
            mesh: mesh of the model.

        Raises:
            ValueError: there are more ranks than heads.
        """
        self.parts = parts
        n, kind = parts.axis.size, type(mixer).__name__
        paths = [_joined(name, path) for path, _ in (*mixer.named_modules(), *mixer.named_parameters())]
        entries = {path: entries[path] for path in paths if path in entries}
        limit = min((most for entry in entries.values() if (most := entry.max_ranks()) is not None), default=n)
        if limit < n:
            raise ValueError(
                f"{parts.option} is more than the {limit} heads of each {kind}, which ranks divide: use 1 to {limit}"
            )
        self._class = type(mixer)
        self._modules = [path for path, _ in mixer.named_modules() if _joined(name, path) in entries]
        self._layouts = dict[str, Layout]()
        for path, param in mixer.named_parameters():
            full = _joined(name, path)
            key = entry_of(full, entries)
            assert key is not None, full
            layout = entries[key].layout(path.rpartition(".")[2], tuple(param.shape), n)
            self._layouts[full] = SliceLayout.of(layout, n)
        self._name, self._entries, self._mesh = name, entries, mesh

    def fits(self, mixer: nn.Module) -> bool:
        """Return whether the parameters of a mixer are those of the plan. Adapters may have added others."""
        return self._layouts.keys() == {_joined(self._name, path) for path, _ in mixer.named_parameters()}

    def local_mixer(self, mixer: nn.Module) -> nn.Module:
        """Return this rank's heads or channels of a mixer, with slices of its current weights."""
        local = self._copied(mixer, "")
        modules = dict(local.named_modules())
        for path in self._modules:
            full, module = _joined(self._name, path), modules[path]
            shards = {leaf: self._layouts[_joined(full, leaf)] for leaf, _ in module.named_parameters(recurse=False)}
            parent = modules[path.rpartition(".")[0]]
            context = _SlicingContext(full, parent, self._mesh, None, shards, self._layouts, self.parts.axis)
            shard_module(module, self._entries[full], context)
            if isinstance(module, ShardedModule) and module.returns_parts:
                module.token_parts = self.parts
        return local

    def _copied(self, module: nn.Module, path: str) -> nn.Module:
        """Return a module with the attributes of another one, and slices of its parameters."""
        made: nn.Module = object.__new__(type(module) if path else self._class)
        own = {name: value for name, value in vars(module).items() if name not in module._parameters}
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
        layout, rank = self._layouts[_joined(self._name, path)], self.parts.axis.rank
        with without_override():
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
            local = self.division.local_mixer(self)
            return type(local).forward(local, *args, **kwargs)  # without the hooks, which this call has
        args, kwargs = with_hidden_states(hidden.full(type(self).__name__), args, kwargs)
        return hidden.with_local(hidden.slice_of(super().forward(*args, **kwargs), TOKENS))
