"""Attention layers of transformers that call the kernels of `oslo_kernels`; `rotary_attention` has more.

The softmax of eager attention is fused through transformers' registry of attention functions. Under ``torch.compile`` a
layer runs transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from oslo_kernels.softmax import masked_softmax, reference
from oslo_models.cache_argument import named_arguments, take_cache, update_cache
from oslo_models.fusion.modules import dropout_add

# Eager attention ------------------------------------------------------------------------------------------------------

FUSED_EAGER = "oslo_models_fused_eager"
"""The name of `fused_eager_attention` among transformers' attention functions."""


class ConfigView:
    """A view of a config that makes an attention layer select another attention function."""

    def __init__(self, config: Any, implementation: str) -> None:
        self._config, self._attn_implementation = config, implementation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class FusedEagerAttention(nn.Module):
    """An attention layer with eager attention that computes scale, mask, bias and softmax in one pass.

    Layers look up their attention function by ``self.config._attn_implementation``. If its value is ``"eager"``, the
    layer sees `FUSED_EAGER` instead. The model's config, which determines the masks, stays unchanged.

    Attributes:
        own_config: the config. The property hides it, and torch 2.11 cannot trace ``__dict__`` past a property.
    """

    own_config: Any

    @property
    def config(self) -> Any:
        """Return the layer's config, or the view of it that selects the fused function."""
        config = self.own_config
        if torch.compiler.is_compiling() or config._attn_implementation != "eager":
            return config
        return ConfigView(config, FUSED_EAGER)

    def softmax(self, scores: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Compute ``softmax(scores * scaling + mask)`` over the last dimension.

        Args:
            scores: ``[batch, heads, queries, keys]``.
            mask: broadcast to the scores.
            scaling: the factor of the scores; the mask is not scaled.
        """
        if mask is not None and not mask.is_floating_point():
            return reference(scores, mask, scaling, causal=False)
        return masked_softmax(scores, mask, scaling)


def fused_eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """``eager_attention_forward`` of Llama, BERT, GPT-2, T5, OPT and Gemma 2 for `FusedEagerAttention`.

    Args:
        **kwargs: options of other attention functions. They are ignored, such as ``sliding_window``, which is already
            in the mask.

    Raises:
        ValueError: ``module`` is another layer, with a possibly different eager attention.
    """
    if not isinstance(module, FusedEagerAttention):
        raise ValueError(
            f"attn_implementation={FUSED_EAGER!r} cannot be used by {type(module).__name__}: fuse() selects it in the "
            "layers that support it; ask for attn_implementation='eager' and call fuse()"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2)
    if softcap is not None:
        scores, scaling = torch.tanh(scores * (scaling / softcap)), softcap
    added = [x for x in (position_bias, attention_mask) if x is not None]
    mask = added[0] + added[1] if len(added) == 2 else added[0] if added else None
    weights = module.softmax(scores, mask, scaling).to(value.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


AttentionInterface.register(FUSED_EAGER, fused_eager_attention)

# BLOOM ----------------------------------------------------------------------------------------------------------------


class FusedBloomAttention(nn.Module):
    """BLOOM's attention: torch's fused attention with ALiBi added to the mask or, with gradients, softmax in one pass.

    In the backward pass, torch's attention recomputes the weights from the logsumexp of each row. This fails in rows
    without visible keys: adding the huge mask value rounds the logarithm away.
    """

    _reshape: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    query_key_value: nn.Module
    dense: nn.Module
    attention_dropout: nn.Dropout
    num_heads: int
    layer_idx: int
    pretraining_tp: int
    inv_norm_factor: float
    hidden_dropout: float

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if (self.pretraining_tp > 1 and self.slow_but_exact) or torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        given = named_arguments(super().forward, args, kwargs)
        return self.attend(hidden_states, take_cache(super().forward, given), **given)

    def attend(
        self,
        hidden_states: Tensor,
        cached: Any,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the fused forward. Return the layer's output, and the attention weights if they were computed."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if cached is not None:
            key, value = update_cache(cached, key, value, self.layer_idx, kwargs)
        bias = alibi.view(len(query), self.num_heads, 1, -1)
        bias = bias if attention_mask is None else bias + attention_mask
        weights = None
        if output_attentions or self.training or torch.is_grad_enabled():
            scores = query @ key.transpose(-1, -2)
            weights = self.attention_dropout(masked_softmax(scores, bias, self.inv_norm_factor))
            attended = weights @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, bias, scale=self.inv_norm_factor)
        output = self.dense(attended.transpose(1, 2).flatten(2))
        return dropout_add(output, residual, self.hidden_dropout, self.training), weights
