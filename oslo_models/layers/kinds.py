"""Kinds of sharded layers: connects the entries of a plan to the layers that implement them.

A kind is an entry and a layer in one file. The entry is data. The layer is the class that a module gets:

    @dataclass(frozen=True)
    class Scaled(Replicated):
        factor: float

    @shards(Scaled, nn.Linear)
    class ScaledLinear(ShardedModule, nn.Linear):
        def configure(self, entry: Scaled, context: ShardingContext) -> None:
            super().configure(entry, context)
            self.factor = entry.factor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.distributed.sharded_tensor import replace_parameter
from oslo_models.layers.sharded_activation import ShardedActivation
from oslo_models.layers.token_division import TokenDivision
from oslo_models.layers.token_parts import require_whole, whole_of
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.layout import Layout

Configure = Callable[[Any, Any, "ShardingContext"], None]
LayerT = TypeVar("LayerT", bound="type[nn.Module] | Configure")
_KINDS: dict[type[Replicated], dict[type[nn.Module], type[nn.Module] | Configure]] = {}


@dataclass(frozen=True)
class ShardingContext:
    """The surroundings of a module while its model is sharded.

    Attributes:
        name: path of the module in the model.
        model: the model.
        mesh: mesh of the model.
        stream: random stream for dropout in the sharded region, or ``None`` if the model uses no dropout.
        shards: layouts of the module's direct parameters.
        layouts: layouts of all parameters and sharded buffers of the model, by their full names.
    """

    name: str
    model: nn.Module
    mesh: ParallelMesh
    stream: ShardedRngStream | None
    shards: dict[str, Layout]
    layouts: Mapping[str, Layout]

    @property
    def parent(self) -> nn.Module:
        """The module around the module."""
        return self.model.get_submodule(self.name.rpartition(".")[0])

    @property
    def tp(self) -> Axis:
        return self.mesh.tp


class ShardedModule(nn.Module):
    """Base of sharded layers.

    Attributes:
        tp: axis over which the layer is sharded.
        stream: random stream for dropout in the sharded region, or ``None`` if the model uses no dropout.
        layouts: layouts of the parameters.
        token_parts: divides tokens between sharded layers, or ``None`` where tokens are whole.
        is_wrapped: whether the code of a custom layer wraps the parallel layer, instead of the reverse.
        takes_parts: whether the layer gathers parts of the tokens itself. Other layers get whole inputs.
        returns_parts: whether the layer returns a part of the tokens of its sum.
    """

    is_wrapped: ClassVar[bool] = False
    takes_parts: ClassVar[bool] = False
    returns_parts: ClassVar[bool] = False
    tp: Axis
    stream: ShardedRngStream | None
    layouts: dict[str, Layout]
    token_parts: TokenDivision | None = None

    def configure(self, entry: Any, context: ShardingContext) -> None:
        """Set the attributes of the layer. Called once, while the parameters still have their full shapes.

        Args:
            entry: entry of the plan.
            context: the surroundings of the module.
        """
        self.tp, self.stream, self.layouts = context.tp, context.stream, context.shards

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Override torch's method, which assignments call: a parameter in place of a shard becomes a shard."""
        replace_parameter(self, name, param)
        super().register_parameter(name, param)

    @classmethod
    def for_layouts(cls, layouts: Mapping[str, Layout]) -> type[nn.Module]:
        """Return the class for parameters with these layouts: a subclass if several ranks hold the same elements."""
        return cls

    @property
    def qconfig(self) -> Any:
        """Reject torch's eager quantisation, which sets this attribute before it replaces layers.

        Raises:
            RuntimeError: on assignment. Eager quantisation would silently skip sharded layers.
        """
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise RuntimeError(
            f"torch.ao.quantization does not quantise sharded layers ({type(self).__name__}): use torchao's "
            "quantize_(), which changes weights only, or tensor_parallel_size=1"
        )

    def enter_region(self, x: Tensor) -> Tensor:
        """Enter the sharded region with the replicated input of a column-parallel layer."""
        if self.stream is not None and self.training:
            self.stream.enter()
        return whole_of(x) if isinstance(x, ShardedActivation) else copy_to(self.tp, x)

    def leave_region(self, x: Tensor) -> Tensor:
        """Leave the sharded region with the sharded input of a row-parallel layer.

        Call it before the layer's product. Activation checkpointing recomputes a block only up to the last tensor that
        the backward pass needs, and this is often the input.
        """
        if self.stream is not None:
            self.stream.leave()
        if self.token_parts is not None:
            require_whole(x, self)
        return x


def shards(entry: type[Replicated], replaced: type[nn.Module] = nn.Module) -> Callable[[LayerT], LayerT]:
    """Register the layer of a kind of entry.

    The layer is a class that modules get in place of ``replaced``, or a function ``(module, entry, context)`` that
    changes a module and may keep its class. If an entry has layers for some classes and for ``nn.Module``, the latter
    replaces the custom layers of an architecture, which are no layers of torch.

    Args:
        entry: class of the entry.
        replaced: class of the replaced modules. With ``nn.Module``, the layer is a mixin before the module's class.
    """

    def register(layer: LayerT) -> LayerT:
        _KINDS.setdefault(entry, {})[replaced] = layer
        return layer

    return register


def shard_module(module: nn.Module, entry: Replicated, context: ShardingContext) -> None:
    """Turn a module into the layer of its entry. Modules of entries without a layer stay as they are.

    Raises:
        ValueError: no layer of the entry replaces modules of this class.
    """
    kinds = next((_KINDS[kind] for kind in type(entry).__mro__ if kind in _KINDS), None)
    if kinds is None:
        return
    known = sorted(kinds, key=lambda kind: kind is nn.Module)  # the most general class last
    if len(known) > 1 and type(module).__module__.startswith("torch."):
        known = [kind for kind in known if kind is not nn.Module]  # such as convolutions: they compute other functions
    replaced = next((kind for kind in known if isinstance(module, kind)), None)
    if replaced is None:
        names = ", ".join(sorted(kind.__name__ for kind in known))
        raise ValueError(f"{context.name} is a {type(module).__name__}; {type(entry).__name__} knows {names}")
    layer: Any = kinds[replaced]
    if not isinstance(layer, type):
        layer(module, entry, context)
        return
    layer = layer.for_layouts(context.shards)  # type: ignore[attr-defined]
    become(module, layer, replaced)
    sharded: Any = module
    sharded.configure(entry, context)


def become(module: nn.Module, layer: type[nn.Module], replaced: type[nn.Module] = nn.Module) -> Any:
    """Change the class of a module to ``layer``, or to a class with ``layer`` as a mixin. Return the module.

    Args:
        replaced: class of the modules that ``layer`` replaces as a whole.
    """
    vars(module).setdefault("_own_class", type(module))
    module.__class__ = layer if type(module) is replaced else _joined(layer, type(module))  # type: ignore[arg-type]
    return module


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `become`."""
    cls: type[nn.Module] = vars(module).get("_own_class", type(module))
    return cls


@cache
def _joined(new: type[nn.Module], old: type[nn.Module]) -> type[nn.Module]:
    """Return the parallel class of a custom layer class.

    The code of a custom embedding or LM head, such as a scale, wraps the parallel lookup or product. Other parallel
    classes wrap the custom class. The class keeps its name, since transformers initialises weights by class names.
    """
    bases = (old, new) if getattr(new, "is_wrapped", False) else (new, old)
    return type(old.__name__, bases, {"__module__": old.__module__})
