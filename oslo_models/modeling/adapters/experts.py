"""LoRA on sharded stacks of experts (``target_parameters`` of ``peft``).

Ranks with different experts hold the A and B of their local experts. If ranks share the width of each expert, the
factor on the side of the width is sharded, and the gradient of the other factor is all-reduced over these ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from oslo_models.distributed.autograd_collectives import average_grad, copy_to
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.sharding.layout import Layout, Range


def parameter_layout(tuner: Any) -> Layout | None:
    """Return the layout of a wrapper's parameter, or ``None`` if it is replicated."""
    layout: Layout | None = (getattr(tuner.get_base_layer(), "layouts", None) or {}).get(tuner.parameter_name)
    return None if layout is None or layout.dim is None else layout


def shape_of(tuner: Any) -> tuple[int, int, int, int]:
    """Return the full sizes of a stack (experts, inputs, outputs) and its output dimension."""
    layout = parameter_layout(tuner)
    experts, first, second = tuner.get_param().shape if layout is None else layout.shape
    if getattr(tuner.get_base_layer(), "is_transposed", False):
        return experts, first, second, 2
    return experts, second, first, 1


def layouts_of_factors(tuner: Any) -> dict[str, Layout]:
    """Return the layouts of a wrapper's sharded factors, by their names in the wrapper."""
    stack = parameter_layout(tuner)
    if stack is None:
        return {}
    experts, inputs, outputs, dim_of_outputs = shape_of(tuner)
    own = stack.ranges if stack.dim == 0 else stack.first_ranges
    width = None if stack.dim == 0 else stack.ranges
    of_outputs, of_inputs = (width, None) if stack.dim == dim_of_outputs else (None, width)
    found = {}
    for name, rank in tuner.r.items():
        # the LoRA ranks of an expert are contiguous in A, the experts of a LoRA rank in B
        rows = [[(start * rank, stop * rank) for start, stop in ranges] for ranges in own]
        columns = [[(at * experts + a, at * experts + b) for at in range(rank) for a, b in ranges] for ranges in own]
        found[f"lora_A.{name}.weight"] = _sharded((rank * experts, inputs), _frozen(rows), of_inputs)
        found[f"lora_B.{name}.weight"] = _sharded((outputs, rank * experts), of_outputs, _frozen(columns))
    return {name: layout for name, layout in found.items() if layout.dim is not None}


Ranges = tuple[tuple[Range, ...], ...]


def _sharded(shape: tuple[int, int], first: Ranges | None, second: Ranges | None) -> Layout:
    """Return the layout of a matrix from the ranges on each rank in its first and second dimension, if sharded."""
    if not second:
        return Layout(shape, 0, first) if first else Layout(shape)
    return Layout(shape, 1, second, first or ())


def _frozen(ranges: list[list[Range]]) -> Ranges:
    return tuple(map(tuple, ranges))


def _shared(factor: Tensor, base: ParallelExperts, layout: Layout | None) -> Tensor:
    """Return a factor with its gradient combined over all ranks that hold the same part, and over all replicas."""
    if layout is None:
        return copy_to(base.tp, factor)
    if base.mesh.is_over_replicas(layout):
        return average_grad(base.mesh.expert_replicas, factor, base.mesh.dp.size)
    shared: Tensor = SumReplicatedGrad.apply(factor, base.tp, layout) if layout.overlaps else factor
    return shared


class ParallelParamWrapper(ParamWrapper):
    """LoRA on a sharded stack of experts."""

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """Return the factors and the scale of this rank's part of the update."""
        with without_override(), self._sharing_gradients(adapter_name):
            factors: tuple[Tensor, Tensor, float] = super().get_delta_factors(adapter_name)
        return factors

    def get_delta_weight(self, adapter_name: str, *_: Any, **__: Any) -> Tensor:
        """Return this rank's part of the update. Unlike ``peft``, this supports a local stack of one expert."""
        left, right, scale = self.get_delta_factors(adapter_name)
        return (left @ right) * scale

    @contextmanager
    def _sharing_gradients(self, adapter: str) -> Iterator[None]:
        """Within the block, combine each factor's gradient over all ranks that hold the same part."""
        base: Any = self.get_base_layer()
        layouts = layouts_of_factors(self)
        factors = {f"lora_{side}.{adapter}.weight": getattr(self, f"lora_{side}")[adapter] for side in "AB"}
        for name, factor in factors.items():
            vars(factor)["weight"] = _shared(factor.weight, base, layouts.get(name))  # hides the parameter
        try:
            yield
        finally:
            for factor in factors.values():
                del vars(factor)["weight"]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        with without_override():
            super().merge(safe_merge, adapter_names)

    def unmerge(self) -> None:
        with without_override():
            super().unmerge()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with without_override():
            output: Tensor = super().forward(x, *args, **kwargs)
        return output
