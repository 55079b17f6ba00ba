"""Layers of transformers with kernels of NVIDIA's apex inside, where that is installed; see `fused` for our own.

apex is imported by the layers that call it and never before: PyPI has another package of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


class ApexRMSNorm(nn.Module):
    """The norm of Llama and of the many models that copy it, and of T5."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        return fused_rms_norm_affine(hidden_states, self.weight, self.weight.shape, self.variance_epsilon)


class ApexLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or input.dtype != self.weight.dtype:
            return super().forward(input)
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


def apex_eager_attention(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``eager_attention_forward`` of Llama, BERT, GPT-2, T5 or OPT: scale, mask and softmax in one pass.

    In half precision and without a bias, which is what apex's softmax of any length takes.
    """

    def eager_attention_forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        takes = attention_mask is not None and attention_mask.is_floating_point() and attention_mask.shape[1] == 1
        if not takes or position_bias is not None or query.dtype not in _HALF:
            bias = {} if position_bias is None else {"position_bias": position_bias}
            given = {"scaling": scaling, "dropout": dropout, **bias, **kwargs}
            return plain(module, query, key, value, attention_mask, **given)
        from apex.transformer.functional.fused_softmax import generic_scaled_masked_softmax

        assert attention_mask is not None
        if (groups := query.shape[1] // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scores = query @ key.transpose(-1, -2)
        hidden = (attention_mask < 0).expand(len(scores), 1, *scores.shape[2:]).contiguous()
        weights = generic_scaled_masked_softmax(scores, hidden, scaling)
        weights = F.dropout(weights, dropout, module.training)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return eager_attention_forward


def why_not() -> str | None:
    """Why apex, which is there, cannot compute, if it cannot: it may be built without what we call."""
    try:
        from apex.normalization import fused_layer_norm
        from apex.transformer.functional import fused_softmax
    except ImportError as error:
        return f"NVIDIA's apex is there but cannot be imported: {error}"
    wanted = {
        fused_layer_norm: ("fused_layer_norm_affine", "fused_rms_norm_affine"),
        fused_softmax: ("generic_scaled_masked_softmax",),
    }
    missing = [
        f"{module.__name__}.{name}" for module, names in wanted.items() for name in names if not hasattr(module, name)
    ]
    return f"NVIDIA's apex is there but has no {', '.join(missing)}" if missing else None
