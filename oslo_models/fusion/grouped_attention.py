"""Attention of single queries to a cache with fewer key heads than query heads, for compiled decoding on GPUs.

Torch's attention with a mask copies keys and values once for each query head of a group. Here the queries of a group
are the rows of one product, so the cache is read once. Source: Ainslie et al., "GQA", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oslo_models.fusion.attention import ConfigView
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION, blockwise_attention

GROUPED = "oslo_models_grouped"
"""The name of `grouped_attention` among transformers' attention functions."""
_UNSUPPORTED = ("softcap", "position_bias", "cache", "s_aux")
"""Options that are left to torch's attention, which supports or rejects them."""


def grouped_when_decoding(config: Any) -> Any:
    """Return a layer's config, or without gradients a view of it that replaces torch's attention by `GROUPED`."""
    if torch.is_grad_enabled() or config._attn_implementation not in TORCH_ATTENTION:
        return config
    return ConfigView(config, GROUPED)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' ``sdpa_attention_forward``, with single queries computed by groups of heads.

    Args:
        query: ``[batch, heads, queries, width]``.
        key, value: ``[batch, key heads, keys, width]``.
        attention_mask: ``[batch or 1, heads or 1, queries, keys]``, boolean or additive.
    """
    heads, groups = key.shape[1], query.shape[1] // key.shape[1]
    special = any(kwargs.get(name) is not None for name in _UNSUPPORTED)
    per_head = attention_mask is not None and (attention_mask.dim() != 4 or attention_mask.shape[1] != 1)
    if query.shape[2] != 1 or groups == 1 or dropout or special or per_head or query.shape[1] % heads:
        given: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
        return blockwise_attention(module, query, key, value, attention_mask, **given, **kwargs)
    batch, _, _, width = query.shape
    scores = _product(query.reshape(batch * heads, groups, width), key.flatten(0, 1).transpose(1, 2))
    scores = scores.view(batch, heads, groups, -1) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, -1).to(value.dtype)
    attended = weights.flatten(0, 1) @ value.flatten(0, 1)
    return attended.view(batch, 1, heads * groups, value.shape[-1]), None


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Multiply batches of matrices. 16-bit inputs give float32, as the scores in torch's attention."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        return x @ y
    return torch.bmm(x, y, out_dtype=torch.float32) if x.is_cuda else x.float() @ y.float()


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
