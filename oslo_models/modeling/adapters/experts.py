"""LoRA on the parameters of stacked experts (``target_parameters`` of ``peft``) that are sharded.

Over ranks that hold different experts, A and B are those of these experts. Over ranks that hold a part of each expert's
width, the factor on the side of the width is sharded, and the gradient of the other one is summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.sharding.layout import Layout


def parameter_layout(tuner: Any) -> Layout | None:
    """The layout of the parameter that a wrapper adapts; ``None`` if every rank holds all of it."""
    layout: Layout | None = (getattr(tuner.get_base_layer(), "layouts", None) or {}).get(tuner.parameter_name)
    return None if layout is None or layout.dim is None else layout


def shape_of(tuner: Any) -> tuple[int, int, int, int]:
    """The full sizes of a stack: experts, inputs, outputs; and which dimension the outputs are."""
    layout = parameter_layout(tuner)
    experts, first, second = tuner.get_param().shape if layout is None else layout.shape
    if getattr(tuner.get_base_layer(), "is_transposed", False):
        return experts, first, second, 2
    return experts, second, first, 1


def layouts_of_factors(tuner: Any) -> dict[str, Layout]:
    """The layouts of the sharded factors of a wrapper, by their names in it."""
    stack = parameter_layout(tuner)
    if stack is None:
        return {}
    experts, inputs, outputs, dim_of_outputs = shape_of(tuner)
    found = {}
    for name, rank in tuner.r.items():
        a, b = f"lora_A.{name}.weight", f"lora_B.{name}.weight"
        if stack.dim == 0:  # A has the ranks of an expert side by side; B has the experts of a rank side by side
            own = [[(start * rank, stop * rank) for start, stop in ranges] for ranges in stack.ranges]
            found[a] = Layout((rank * experts, inputs), 0, tuple(map(tuple, own)))
            own = [
                [(at * experts + start, at * experts + stop) for at in range(rank) for start, stop in ranges]
                for ranges in stack.ranges
            ]
            found[b] = Layout((outputs, rank * experts), 1, tuple(map(tuple, own)))
        elif stack.dim == dim_of_outputs:
            found[b] = Layout((outputs, rank * experts), 0, stack.ranges)
        else:
            found[a] = Layout((rank * experts, inputs), 1, stack.ranges)
    return found


class ParallelParamWrapper(ParamWrapper):
    """LoRA on a sharded stack of experts."""

    def get_delta_factors(self, adapter_name: str) -> tuple[Tensor, Tensor, float]:
        """The factors of this rank's part of the update, and its scale."""
        with without_override(), self._sum_gradient_of_replicated_factor(adapter_name):
            factors: tuple[Tensor, Tensor, float] = super().get_delta_factors(adapter_name)
        return factors

    def get_delta_weight(self, adapter_name: str, *_: Any, **__: Any) -> Tensor:
        """This rank's part of the update; a stack may have one expert here."""
        left, right, scale = self.get_delta_factors(adapter_name)
        return (left @ right) * scale

    @contextmanager
    def _sum_gradient_of_replicated_factor(self, adapter: str) -> Iterator[None]:
        axis: Any = self.get_base_layer().tp
        layouts = layouts_of_factors(self)
        factors = {f"lora_{side}.{adapter}.weight": getattr(self, f"lora_{side}")[adapter] for side in "AB"}
        replicated = [factor for name, factor in factors.items() if name not in layouts]
        for factor in replicated:
            vars(factor)["weight"] = copy_to(axis, factor.weight)  # hides the parameter
        try:
            yield
        finally:
            for factor in replicated:
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
