"""Tensor and expert parallelism for MoE layers with separate modules for experts, instead of stacked weights."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.custom_layers import SummedModule
from oslo_models.layers.linear import ColumnParallelLinear, RowParallelLinear, _ShardedModule
from oslo_models.sharding.layout import even_ranges


class SomeExperts(_ShardedModule):
    """Module with the local experts. Each group of ranks holds some of the experts.

    Attributes:
        first: number of the first local expert.
        num_experts: number of local experts.
        over_ranks: whether other ranks have other experts.
    """

    first: int
    num_experts: int
    over_ranks: bool

    def set_experts(self, groups: int) -> None:
        """Set the local experts for ``groups`` groups of ranks. Call it after ``tp`` is set."""
        first, stop = even_ranges(self.num_experts, groups)[self.tp.rank * groups // self.tp.size]
        self.first, self.num_experts, self.over_ranks = first, stop - first, groups > 1

    def own_sizes(self, sizes: list[int]) -> tuple[int, list[int]]:
        """Return the number of rows before the local experts, and the number of rows of each local expert."""
        return sum(sizes[: self.first]), sizes[self.first : self.first + self.num_experts]


class RoutedExpertsModule(SomeExperts, SummedModule):
    """Experts that take the choices of a router. Each rank computes the tokens of its local experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: ``[rows, positions, hidden]``, replicated.
            top_k_index: the experts of each token, ``[tokens, k]``.
            top_k_weights: the router weights, ``[tokens, k]``.

        Returns:
            ``[rows, positions, hidden]``, replicated.
        """
        if not self.over_ranks:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        with without_override():
            x = self.leave_region(self.enter_region(hidden_states)).flatten(0, -2)  # no dropout is inside
            is_own = (top_k_index >= self.first) & (top_k_index < self.first + self.num_experts)
            weights = copy_to(self.tp, top_k_weights).masked_fill(~is_own, 0)
            tokens, choices = is_own.nonzero(as_tuple=True)
            if not len(tokens):  # a dummy token of weight zero, so that this rank joins the all-reduces of gradients
                tokens = choices = tokens.new_zeros(1)
            index = (top_k_index - self.first).clamp(0, self.num_experts - 1)
            chosen = (x[None, tokens], index[tokens, choices, None], weights[tokens, choices, None])
            computed = super(SummedModule, self).forward(*chosen)
            output = x.new_zeros(x.shape).index_add(0, tokens, computed.flatten(0, -2))
            return reduce_from(self.tp, output.view(hidden_states.shape))


class StackedColumnModule(SomeExperts):
    """One linear layer per expert, with sharded output features."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Return the outputs of the local experts.

        Args:
            inputs: ``[rows, in]``, replicated and sorted by expert.
            expert_size: number of rows of each expert.

        Returns:
            ``[local rows, local out]``.
        """
        with without_override():
            before, own = self.own_sizes(expert_size)
            local = self.enter_region(inputs)[before : before + sum(own)]
            output: Tensor = super().forward(local, own)
            return output


class StackedRowModule(SomeExperts):
    """One linear layer per expert, with sharded input features."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Return the outputs of all experts.

        Args:
            inputs: ``[local rows, local in]``, the inputs of the local experts.
            expert_size: number of rows of each expert, including remote experts.

        Returns:
            ``[rows, out]``, replicated.
        """
        with without_override():
            before, own = self.own_sizes(expert_size)
            output: Tensor = super().forward(self.leave_region(inputs), own)
            after = sum(expert_size) - before - sum(own)
            return reduce_from(self.tp, F.pad(output, (0, 0, before, after)) if self.over_ranks else output)


class SeparateExpertsModule(SummedModule):
    """Container of one MLP per expert. All-reduces the partial outputs together, and the input gradients together.

    All ranks visit the experts with tokens in the same order, including remote experts. Remote experts add zeros, and
    output dropouts draw the same masks on all ranks.
    """

    def forward(self, hidden_states: Tensor, *args: Any) -> Any:
        layers = self._layers()
        if not layers:
            return super(SummedModule, self).forward(hidden_states, *args)
        self._set_joint(layers, True)
        try:
            return super().forward(hidden_states, *args)
        finally:
            self._set_joint(layers, False)

    @staticmethod
    def _set_joint(layers: list[Any], joint: bool) -> None:
        for layer in layers:
            if isinstance(layer, ColumnParallelLinear):
                layer.sums_no_gradients = joint
            else:
                layer.returns_partial_sums = joint

    def _layers(self) -> list[Any]:
        """Return the layers with a joint all-reduce, or none if some layer needs a separate all-reduce.

        Layers with adapters, hooks or another weight format need full outputs.
        """
        found: list[Any] = []
        for expert in self.children():
            layers = [layer for layer in expert.children() if any(True for _ in layer.parameters())]
            known = all(type(layer) in (ColumnParallelLinear, RowParallelLinear) for layer in layers)
            if not known or any(each._forward_hooks for each in (expert, *layers)):
                return []
            found += layers
        return found
