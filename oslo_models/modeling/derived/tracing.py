"""Traces calls of a model: linear layers that read sharded activations, and weights read outside of their layer.

Calls run on full tensors, on an axis of size one. Each activation records how it would be sharded
(`ShardedActivation`), so tracing follows the same propagation rules as the sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.mesh import Axis
from oslo_models.layers.gathered import call_by_itself
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec


@dataclass
class Trace:
    """Observations of the traced calls, by layer name.

    Attributes:
        fixed: linear layers that always shard their outputs: they have tied weights, or calls disagree about them.
        rows: row-parallel layers, which read sharded inputs, with the number of units in the input.
        columns: column-parallel layers, which shard their outputs.
        lazy: layers with outputs that reach a layer of `rows` without a gather.
        units, parts: how to split each layer's output so that its readers can use the shards.
        outside: layers with weights that other code reads, and the function that reads them.
        called: the layers that were called.
        inside: the layers that are running now.
        gather: whether layers return plain tensors, so that no layer reads sharded inputs.
    """

    fixed: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    lazy: set[str] = field(default_factory=set)
    units: dict[str, int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    inside: list[nn.Module] = field(default_factory=list)
    gather: bool = False
    changed: bool = False

    def gathered(self, sources: frozenset[str], why: str) -> None:
        """See `Observer`. Does nothing: a gather costs time, but never changes the plan."""

    def propose(self, sources: frozenset[str], units: int | None = None, parts: int | None = None) -> None:
        """See `Observer`."""
        for source in sources:
            if parts is not None and self.parts.get(source, 1) == 1 and parts > 1:
                self.parts[source], self.changed = parts, True
                self.units.pop(source, None)
            elif units is not None and units > 1 and self.units.get(source) != units:
                self.units[source], self.changed = units, True

    def begin(self) -> None:
        """Reset the trace for another round of calls, but keep `fixed`, `units` and `parts`."""
        self.rows, self.changed = {}, False
        for seen in (self.columns, self.lazy, self.called):
            seen.clear()

    def row(self, path: str, x: Any) -> Tensor | None:
        """Return the local input of a row-parallel layer, or ``None`` if the layer has to shard its outputs instead."""
        if path in self.fixed or not isinstance(x, ShardedActivation):
            return None
        if x.spec.dim != x.dim() - 1 or x.spec.parts > 1 or self.rows.get(path, x.spec.units) != x.spec.units:
            return None
        self.rows[path] = x.spec.units
        self.lazy |= x.sources
        return x.local()

    def column(self, path: str, output: Tensor) -> Tensor:
        """Return the output of a column-parallel layer, marked as sharded."""
        self.columns.add(path)
        if self.gather or output.shape[-1] < 2:
            return output
        size, parts = output.shape[-1], self.parts.get(path, 1)
        units = self.units.get(path, size // parts)
        if size % parts or size // parts % units:
            parts, units = 1, size
        spec = ShardSpec(output.dim() - 1, units, parts)
        return ShardedActivation.from_local(output, Axis.alone("tp"), spec, size, frozenset([path]), self)


class _Traced(nn.Module):
    """A traced layer."""

    path: str
    trace: Trace

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        trace, path = self.trace, self.path
        trace.called.add(path)
        is_linear = isinstance(self, (nn.Linear, Conv1D))
        row = trace.row(path, x) if is_linear else None
        full = x.full("the input of a layer") if row is None and isinstance(x, ShardedActivation) else x
        trace.inside.append(self)
        try:
            output = super().forward(full if row is None else row, *args, **kwargs)
        finally:
            trace.inside.pop()
        return trace.column(path, output) if is_linear and row is None else output


class _TracedEmbedding(_Traced, nn.Embedding):  # type: ignore[misc]
    """A traced embedding. Only the lookup is traced: code that a subclass adds counts as outside of the layer."""


@cache
def _traced(cls: Any) -> type[nn.Module]:
    bases = (cls, _TracedEmbedding) if issubclass(cls, nn.Embedding) and cls is not nn.Embedding else (_Traced, cls)
    return type(cls.__name__, bases, {"__module__": cls.__module__})


class _Readers(TorchFunctionMode):
    """Records functions that read a traced layer's parameters outside of its forward."""

    def __init__(self, trace: Trace, owners: Mapping[int, list[tuple[str, nn.Module]]]) -> None:
        super().__init__()
        self._trace, self._owners = trace, owners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            for leaf in tree_leaves((args, kwargs or {})):
                owners = self._owners.get(id(leaf), ()) if isinstance(leaf, Tensor) else ()
                if owners and not any(module is each for _, module in owners for each in self._trace.inside):
                    name = getattr(func, "__name__", str(func))
                    self._trace.outside.update((path, name) for path, _ in owners)
        return func(*args, **(kwargs or {}))


_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_meta", "grad", "is_leaf")),
    *(Tensor.is_floating_point, Tensor.register_hook, Tensor.get_device),
}


def trace_calls(
    model: nn.Module,
    candidates: Mapping[str, nn.Module],
    fixed: set[str],
    calls: list[Callable[[nn.Module], Any]],
    gather: bool = False,
) -> Trace:
    """Trace calls of a model. This changes the model, so discard it afterwards.

    Args:
        candidates: the layers to trace, by name.
        fixed: see `Trace`.
        calls: functions that call the model, each in another way.
        gather: see `Trace`.
    """
    trace = Trace(set(fixed), gather=gather)
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, module in candidates.items():
        for _, param in module.named_parameters(recurse=False):
            owners.setdefault(id(param), []).append((path, module))
        cls: Any = type(module)
        module.__class__ = _traced(cls)
        vars(module).update(path=path, trace=trace)
        module.register_forward_pre_hook(call_by_itself)
    for _ in range(12):
        trace.begin()
        for call in calls:
            with _Readers(trace, owners):
                call(model)
        if trace.changed:
            continue
        mixed = trace.columns & trace.rows.keys()
        if not mixed:
            return trace
        trace.fixed |= mixed
    # Layers propose contradictory splits to each other: gather all outputs.
    trace.rows, trace.lazy, trace.units, trace.parts = {}, set(), {}, {}
    return trace
