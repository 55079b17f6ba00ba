"""Layers of transformers with kernels of NVIDIA's apex inside, where that is installed; see `fused` for our own.

apex is imported by the layers that call it and never before: PyPI has another package of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.fusion.modules import eager_attention

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
    """Scale, mask and softmax in one pass of apex's kernel for any length.

    It takes half precision, and a mask that hides or does not: no bias, be it an argument or part of the mask.
    """
    return eager_attention(plain, _softmax, _takes)


def _takes(query: Tensor, mask: Tensor | None, bias: Tensor | None) -> bool:
    if mask is None or bias is not None or query.dtype not in _HALF:
        return False
    if not mask.is_floating_point() or mask.shape[1] != 1:
        return False
    return bool(((mask == 0) | _hidden(mask)).all())


def _hidden(mask: Tensor) -> Tensor:
    """What a mask of transformers hides: it has the smallest number there, and nothing adds to that."""
    return mask <= torch.finfo(mask.dtype).min / 2


def _softmax(scores: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    from apex.transformer.functional.fused_softmax import generic_scaled_masked_softmax

    assert mask is not None  # as `_takes` says
    hidden = _hidden(mask).expand(len(scores), 1, *scores.shape[2:]).contiguous()
    return generic_scaled_masked_softmax(scores, hidden, scaling)


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
