"""`nn.MultiheadAttention` with sharded heads. It keeps the full sizes, and takes and returns full tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.gathered import DerivedLayer
from oslo_models.layers.kinds import shards
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class SplitHeads(Replicated):
    """``nn.MultiheadAttention`` with sharded heads. It is replicated if there are more ranks than heads.

    Args:
        heads: the heads.
    """

    heads: EvenSplit

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        parts = 3 if leaf.startswith("in_proj") else 1
        dim = len(shape) - 1 if leaf in ("bias_k", "bias_v") else 0
        return Layout(shape) if self.heads.count < n else Layout.sharded(shape, dim, (self.heads,) * parts, n)


@shards(SplitHeads, nn.MultiheadAttention)
class HeadParallelAttention(DerivedLayer, nn.MultiheadAttention):
    """Each rank computes its local heads, and ``out_proj`` all-reduces the outputs.

    It has the same arguments and results as ``nn.MultiheadAttention``.
    """

    entry: SplitHeads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = (x.full() if isinstance(x, ShardedActivation) else x for x in (query, key, value))
        if next(iter(self.layouts.values())).dim is None:
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal=True describes attn_mask: pass attn_mask too")
        batched, first = query.dim() == 3, self.batch_first
        with without_override():
            own = self._projected([copy_to(self.tp, x) for x in (query, key, value)])
        if not batched:
            own = [x.unsqueeze(0) for x in own]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not first:
            own = [x.transpose(0, 1) for x in own]
        mask = self._mask(attn_mask, key_padding_mask, own[0])
        q, k, v, mask = self._with_added_keys(own, mask)
        context, weights = self._attend(q, k, v, mask, need_weights)
        heads = self.entry.heads
        spec = ShardSpec(2, heads.count)
        output = self.out_proj(ShardedActivation.from_local(context, self.tp, spec, self.embed_dim))
        if weights is not None and average_attn_weights:
            weights = reduce_from(self.tp, weights.sum(1)) / heads.count
        elif weights is not None:
            weights = gather_from(self.tp, weights, 1, [b - a for a, b in heads.unit_ranges(self.tp.size)])
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if first else output.transpose(0, 1), weights

    def _projected(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return queries, keys and values of the local heads."""
        whole = self.in_proj_weight
        weights = whole.chunk(3) if whole is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, query: Tensor) -> Tensor | None:
        """Return the additive mask of the scores ``[rows, local heads, queries, keys]``."""
        parts = []
        if attn_mask is not None:
            own = _additive(attn_mask, query)
            if own.dim() == 3:
                start, stop = self.entry.heads.unit_ranges(self.tp.size)[self.tp.rank]
                own = own.unflatten(0, (-1, self.entry.heads.count))[:, start:stop]
            parts.append(own)
        if padding is not None:
            parts.append(_additive(padding, query)[:, None, None])
        return sum(parts[1:], parts[0]) if parts else None

    def _with_added_keys(self, own: list[Tensor], mask: Tensor | None) -> tuple[Any, ...]:
        """Split queries, keys and values by head, and add the keys of ``add_bias_kv`` and ``add_zero_attn``."""
        query, key, value = own
        if self.bias_k is not None and self.bias_v is not None:
            rows = (len(key), 1, -1)
            with without_override():
                key = torch.cat((key, self.bias_k.expand(*rows)), 1)
                value = torch.cat((value, self.bias_v.expand(*rows)), 1)
            mask = None if mask is None else F.pad(mask, (0, 1))
        split = [x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (query, key, value)]
        if self.add_zero_attn:
            split[1:] = [F.pad(x, (0, 0, 0, 1)) for x in split[1:]]
            mask = None if mask is None else F.pad(mask, (0, 1))
        return (*split, mask)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs of the local heads, ``[rows, queries, features]``, and their attention weights."""
        rate, weights = self.dropout if self.training else 0.0, None
        stream = ShardedRngStream(self.tp, query.device)
        if rate:
            stream.enter()
        try:
            if need_weights:
                scores = (query * self.head_dim**-0.5) @ key.transpose(-2, -1)
                weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
                context = weights @ value
            else:
                context = F.scaled_dot_product_attention(query, key, value, mask, rate)
        finally:
            stream.leave()
        return context.transpose(1, 2).flatten(2), weights


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    return query.new_zeros(mask.shape).masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else mask
