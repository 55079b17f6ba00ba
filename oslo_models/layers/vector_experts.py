"""Experts with one pair of vectors each: rows of two embeddings with sharded features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.layers.custom_layers import FunctionOverrides
from oslo_models.layers.linear import _ShardedModule


class VectorExpertsModule(_ShardedModule):
    """Mixture that multiplies its input by rows of ``down_embed``, and the result by rows of ``up_embed``.

    The forward calls ``torch.matmul`` for both products. Input and output are replicated.
    """

    down_embed: Any

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        layout = self.down_embed.layouts["weight"]
        sizes, size = [stop - start for ((start, stop),) in layout.ranges], layout.shape[1]

        def product(left: Tensor, right: Tensor) -> Tensor:
            if right.shape[-2] == size and right.shape[-1] == 1:  # rows [tokens, chosen, local] by [tokens, hidden, 1]
                return reduce_from(self.tp, torch.matmul(left, scatter_to(self.tp, right, -2, sizes)))
            return gather_from(self.tp, torch.matmul(copy_to(self.tp, left), right), -1, sizes)

        with FunctionOverrides({torch.matmul: product}):
            return super().forward(hidden_states, **kwargs)
