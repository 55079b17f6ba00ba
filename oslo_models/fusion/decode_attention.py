"""Attention layers on a CPU with single-query attention in C++ for decoding.

Layers find the C++ function through transformers' registry of attention functions: `DECODING` replaces torch's
attention. With gradients, under ``torch.compile`` and for more queries, layers compute as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from oslo_kernels.decode_attention import attend, computes
from oslo_models.fusion.attention import ConfigView
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION, blockwise_attention

DECODING = "oslo_models_decoding"
"""The name of `decoding_attention` among transformers' attention functions."""


class DecodingAttention(nn.Module):
    """A mixin before an attention layer with torch's attention.

    Attributes:
        own_config: the config.
    """

    own_config: Any

    @property
    def config(self) -> Any:
        """Return the layer's config, or the view of it that selects `DECODING`."""
        config = self.own_config
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or config._attn_implementation not in TORCH_ATTENTION
        ):
            return config
        return ConfigView(config, DECODING)


def decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' ``sdpa_attention_forward``, in C++ where `computes` is true.

    Args:
        **kwargs: further options of ``sdpa_attention_forward``, which also handles the unsupported ones.
    """
    if computes(query, key, value, (attention_mask, position_bias)) and not dropout and not _is_special(kwargs):
        shown, added = attention_mask, position_bias
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            shown, added = None, attention_mask if added is None else attention_mask + added
        if added is None or added.dtype is query.dtype:
            return attend(
                query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling, shown, added
            ), None
    given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "position_bias": position_bias}
    return blockwise_attention(module, query, key, value, attention_mask, **given, **kwargs)


def _is_special(options: dict[str, Any]) -> bool:
    return any(options.get(name) is not None for name in ("softcap", "cache"))


AttentionInterface.register(DECODING, decoding_attention)
