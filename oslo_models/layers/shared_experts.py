"""Mixture with shared and routed experts. Their partial outputs are added and all-reduced once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.linear import RowParallelLinear
from oslo_models.layers.summed import SummedLayer


class SharedExpertsModule(nn.Module):
    """MoE block that adds the outputs of shared and routed experts. Runs transformers' forward.

    Attributes:
        tp: axis over which all experts are sharded.
        shared: name of the shared experts in the module.
    """

    tp: Axis
    shared: str

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        summands = self._summands()
        for each in summands:
            each.returns_partial_sums = True
        try:
            output = super().forward(hidden_states, *args, **kwargs)
        finally:
            for each in summands:
                each.returns_partial_sums = False
        return reduce_from(self.tp, output) if summands else output

    def _summands(self) -> list[Any]:
        """Return the two layers with a joint all-reduce, or none if one of them needs a separate all-reduce.

        A layer with an adapter or hooks needs its full output.
        """
        experts: Any = self.experts
        shared: Any = getattr(self, self.shared)
        last: Any = shared if isinstance(shared, SummedLayer) else getattr(shared, "down_proj", None)
        known = last is shared or type(last) is RowParallelLinear
        if not (known and hasattr(type(experts), "returns_partial_sums")):
            return []
        return [] if any(each._forward_hooks for each in (experts, shared, last)) else [experts, last]
