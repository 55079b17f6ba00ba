"""Norms of queries and keys over all heads of all ranks, fused with rotary position embeddings.

One all-reduce sums the squares of queries and keys over the ranks. The backward pass has one all-reduce too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oslo_kernels.full_norm_rotary import full_norm_rotary, full_norm_rotary_backward, row_products
from oslo_models.distributed.collectives import reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion.norms import is_plain


@dataclass(frozen=True)
class FullNorms:
    """The parameters of the norms of an attention layer.

    Attributes:
        axis: the axis of the ranks with the heads.
        counts: the numbers of elements of the queries and of the keys over all ranks.
        offset: a number to add to the weights.
        keeps_dtype: whether the norms keep the dtype of their input even if the weights have a wider dtype.
    """

    axis: Axis
    counts: tuple[int, int]
    eps: float
    offset: float
    keeps_dtype: bool

    def and_rotate(
        self, norms: tuple[Any, Any], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return queries and keys, ``[batch, heads, length, width]``, with norms and positions.

        Return ``None`` if the norms must be called as modules. Their collectives differ, so a hook on a norm must be on
        all ranks.
        """
        if not all(self._is_supported(norm, x) for norm, x in zip(norms, (query, key), strict=True)):
            return None
        same = query.dtype == key.dtype and norms[0].weight.dtype == norms[1].weight.dtype
        turned = cos.dim() == 3 and cos.shape[-1] == query.shape[-1] and query.shape[-1] % 2 == 0
        if not (same and turned) or cos.requires_grad or sin.requires_grad:
            return None
        return norm_and_rotate_heads(self, query, key, cos, sin, norms[0].weight, norms[1].weight)

    def _is_supported(self, norm: Any, x: Tensor) -> bool:
        """Return whether the kernel can replace the norm and gives the dtype of transformers."""
        right = self.keeps_dtype or torch.promote_types(x.dtype, norm.weight.dtype) == norm.weight.dtype
        return right and is_plain(norm, x.shape[1] * x.shape[3], x.device)


def norm_and_rotate_heads(
    norms: FullNorms, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor, key_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the local queries and keys with norms over all heads and positions: two launches and an all-reduce."""
    made: tuple[Tensor, Tensor] = _NormAndRotate.apply(query, key, cos, sin, query_weight, key_weight, norms)
    return made


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor, key_weight: Tensor,
        norms: FullNorms,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        squares = reduce_fresh(norms.axis, row_products(query, query, key, key))
        given = (query, key, cos, sin, query_weight, key_weight, squares)
        made: tuple[Tensor, Tensor] = full_norm_rotary(
            *given, *norms.counts, norms.eps, norms.offset, norms.keeps_dtype
        )
        ctx.save_for_backward(*given, *made)
        ctx.norms = norms
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
        norms: FullNorms = ctx.norms
        *given, query, key = ctx.saved_tensors
        products = reduce_fresh(norms.axis, row_products(of_query, query, of_key, key))
        numbers = (*norms.counts, norms.eps, norms.offset)
        dq, dk, of_query_weight, of_key_weight = full_norm_rotary_backward(of_query, of_key, *given, products, *numbers)
        return dq, dk, None, None, of_query_weight, of_key_weight, None
