"""Mixtures of experts over the tp axis: every rank holds a part of the width of every expert.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, applied to each expert.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.linear import _ShardedModule


class TensorParallelExperts(_ShardedModule):
    """Experts whose forward is that of transformers, computed with a part of the width of each of them.

    The router is replicated, so all ranks send the same tokens to the same experts. The outputs of a rank are partial
    sums over the width, and so are the gradients of hidden states and of router weights.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Tensor:
        """The weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: ``[tokens, hidden]``, replicated.
            top_k_index: the experts of each token, ``[tokens, k]``.
            top_k_weights: their weights, ``[tokens, k]``.

        Returns:
            ``[tokens, hidden]``, replicated.
        """
        with without_override():
            hidden_states = self.enter_region(hidden_states)
            weights = copy_to(self.tp, top_k_weights)
            # No dropout is in experts: the region ends before the product, as `leave_region` wants it.
            hidden_states = self.leave_region(hidden_states)
            return reduce_from(self.tp, super().forward(hidden_states, top_k_index, weights, *args))
