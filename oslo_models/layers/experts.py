"""Mixtures of experts over the tp axis: every rank holds a part of the width of every expert.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3, applied to each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
            with self._own_share_of_bias():
                return reduce_from(self.tp, super().forward(hidden_states, top_k_index, weights, *args))

    @contextmanager
    def _own_share_of_bias(self) -> Iterator[None]:
        """While active, the replicated bias of the outputs is this rank's share of it: they are summed with it."""
        bias = getattr(self, "down_proj_bias", None)  # not of `_parameters`, which may hold a part of it
        if bias is not None:
            self.__dict__["down_proj_bias"] = copy_to(self.tp, bias) / self.tp.size  # found before the parameter
        try:
            yield
        finally:
            self.__dict__.pop("down_proj_bias", None)
