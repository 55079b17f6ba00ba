"""Layers of transformers that call the kernels of NVIDIA's apex; `oslo_kernels` has the kernels of this project.

Only layers that call apex import it, since PyPI has another package of that name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oslo_kernels.softmax import reference
from oslo_models.fusion.attention import FusedEagerAttention

_HALF = (torch.float16, torch.bfloat16)


class ApexRMSNorm(nn.Module):
    """The root-mean-square norm of Llama, of its copies and of T5."""

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


class ApexEagerAttention(FusedEagerAttention):
    """Scale, mask and softmax in one pass of apex's kernel for any length.

    The kernel needs half precision and a mask without bias: each key is either visible or hidden. Torch computes other
    inputs.
    """

    def softmax(self, scores: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        if mask is None or not _is_supported(scores, mask):
            return reference(scores, mask, scaling, causal=False)
        from apex.transformer.functional.fused_softmax import generic_scaled_masked_softmax

        hidden = _hidden(mask).expand(len(scores), 1, *scores.shape[2:]).contiguous()
        return generic_scaled_masked_softmax(scores, hidden, scaling)


def _is_supported(scores: Tensor, mask: Tensor) -> bool:
    if scores.dtype not in _HALF or not mask.is_floating_point() or mask.shape[1] != 1:
        return False
    return bool(((mask == 0) | _hidden(mask)).all())


def _hidden(mask: Tensor) -> Tensor:
    """Return the hidden keys of a transformers mask, which have the smallest number of its dtype."""
    return mask <= torch.finfo(mask.dtype).min / 2


def unavailable_reason() -> str | None:
    """Return why the installed apex cannot be used, or ``None``. Its build may lack required kernels."""
    try:
        from apex.normalization import fused_layer_norm
        from apex.transformer.functional import fused_softmax
    except ImportError as error:
        return f"NVIDIA's apex is installed but cannot be imported: {error}"
    needed = {
        fused_layer_norm: ("fused_layer_norm_affine", "fused_rms_norm_affine"),
        fused_softmax: ("generic_scaled_masked_softmax",),
    }
    missing = [
        f"{module.__name__}.{name}" for module, names in needed.items() for name in names if not hasattr(module, name)
    ]
    return f"NVIDIA's apex is installed but has no {', '.join(missing)}" if missing else None
