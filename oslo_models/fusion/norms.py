"""Norms of transformers that call `oslo_kernels.norm`, alone or together with the preceding residual addition.

Under ``torch.compile``, and for inputs that the kernel does not support, a norm runs transformers' code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oslo_kernels import passes
from oslo_kernels.norm import add_norm, norm_add
from oslo_kernels.normed_rotary import normed_rotary
from oslo_kernels.small_operations import computes, rms_norm
from oslo_models.fusion.known_layers import GEMMA_NORMS, OLMO2_NORMS, RMS_NORMS, layer_name_of
from oslo_models.layers.norm import HeadParallelNorm


class FusedRMSNorm(nn.Module):
    """The root-mean-square norm of Llama, of its copies and of T5, in one pass.

    Given a residual, it returns the norm of ``hidden_states + residual``, and the sum.

    Attributes:
        offset: a number to add to the weight.
        keeps_dtype: whether the norm keeps the dtype of its input even if the weight has a wider dtype.
    """

    weight: Tensor
    variance_epsilon: float
    offset = 0.0
    keeps_dtype = False

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None and not torch.compiler.is_compiling():
            known = getattr(hidden_states, "_oslo_norm", None)
            if known is not None and known.norm is self and known.versions == self._versions(hidden_states):
                return known.normed
        if torch.compiler.is_compiling() or not self.is_supported(hidden_states, residual):
            if residual is None:
                return super().forward(hidden_states)
            summed = hidden_states + residual
            return super().forward(summed), summed
        options = (self.variance_epsilon, False, self.offset, self.keeps_dtype)
        normed, summed, _ = add_norm(hidden_states, residual, own_weight(self), None, *options)
        return normed if residual is None else (normed, summed)

    def is_supported(self, hidden_states: Tensor, residual: Tensor | None = None) -> bool:
        """Return whether the kernel gives the dtype of transformers' norm, which may cast to a narrower dtype."""
        dtype = hidden_states.dtype if residual is None else torch.promote_types(hidden_states.dtype, residual.dtype)
        same_shape = residual is None or residual.shape == hidden_states.shape
        return same_shape and (self.keeps_dtype or torch.promote_types(dtype, self.weight.dtype) == self.weight.dtype)

    def remember(self, hidden_states: Tensor, normed: Tensor) -> None:
        """Attach the norm to these hidden states for the next call with them."""
        hidden_states._oslo_norm = KnownNorm(self, self._versions(hidden_states), normed)  # type: ignore[attr-defined]

    def _versions(self, hidden_states: Tensor) -> tuple[int, int]:
        """Return version counters that change with the hidden states and the weight."""
        return hidden_states._version, self.weight._version


class CPURMSNorm(nn.Module):
    """The norm of Llama, of its copies, of T5 and of OLMo 2 on a CPU in one pass, with a path for few rows.

    The path for few rows needs no gradients.

    Attributes:
        offset: a number to add to the weight.
    """

    weight: Tensor
    variance_epsilon: float
    offset = 0.0

    def forward(self, hidden_states: Tensor) -> Any:
        if computes(hidden_states, self.weight):
            return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset)
        if passes.computes(hidden_states, self.weight):
            return passes.rms_norm(hidden_states, own_weight(self), self.variance_epsilon, self.offset)
        return super().forward(hidden_states)


class CPUGemmaNorm(CPURMSNorm):
    """`CPURMSNorm` for Gemma and its copies."""

    eps: float
    offset = 1.0

    @property
    def variance_epsilon(self) -> float:  # type: ignore[override]
        """Gemma's name is ``eps``."""
        return self.eps


class KnownNorm:
    """A norm computed ahead of its call. Copies of the hidden states, including pickled ones, drop it."""

    def __init__(self, norm: Any = None, versions: Any = None, normed: Any = None) -> None:
        self.norm, self.versions, self.normed = norm, versions, normed

    def __reduce__(self) -> Any:
        return KnownNorm, ()


class FusedGemmaNorm(FusedRMSNorm):
    """The norm of Gemma and of its copies, which adds one to the weight."""

    eps: float
    offset = 1.0
    keeps_dtype = True

    @property
    def variance_epsilon(self) -> float:  # type: ignore[override]
        """Gemma's name is ``eps``."""
        return self.eps


class FusedOlmo2Norm(FusedRMSNorm):
    """The norm of OLMo 2 and of its copies, which multiplies by the weight in float32."""

    keeps_dtype = True


class FusedLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm``; given a residual, the norm of ``input + residual`` and that sum, in one pass."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return super().forward(input)
        if torch.compiler.is_compiling() or not self._is_supported(input, residual):
            summed = input + residual
            return super().forward(summed), summed
        normed, summed, _ = add_norm(input, residual, self.weight, self.bias, self.eps, True)
        return normed, summed

    def _is_supported(self, input: Tensor, residual: Tensor) -> bool:
        """Return whether the kernel gives the dtype of torch's norm: under autocast always float32."""
        dtype = torch.promote_types(input.dtype, residual.dtype)
        right = dtype == torch.float32 or not torch.is_autocast_enabled(input.device.type)
        return right and dtype == self.weight.dtype and input.shape == residual.shape


def norm_and_rotate(
    norms: tuple[nn.Module, nn.Module], query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys, ``[batch, heads, length, width]``, with norms of heads and rotary positions.

    One pass computes both. Return ``None`` if the norms must be called as modules.
    """
    first, second = norms
    if not (isinstance(first, FusedRMSNorm) and isinstance(second, FusedRMSNorm) and cos.dim() == 3):
        return None
    both = ((first, query), (second, key))
    if not all(is_plain(norm, x.shape[-1], x.device) and norm.is_supported(x) for norm, x in both):
        return None
    of_both = [(norm.weight.dtype, norm.variance_epsilon, norm.offset, norm.keeps_dtype, x.dtype) for norm, x in both]
    width_is_turned = cos.shape[-1] == query.shape[-1] and query.shape[-1] % 2 == 0
    if of_both[0] != of_both[1] or not width_is_turned or cos.requires_grad or sin.requires_grad:
        return None
    options = (first.variance_epsilon, first.offset, first.keeps_dtype)
    query, key, _ = normed_rotary(query, key, cos, sin, own_weight(first), own_weight(second), *options)
    return query, key


def add_and_norm_ahead(block: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Compute ``x + residual``. If possible, compute the next norm in the same pass and attach it to the sum.

    The norm waits for its call if other code takes part in it: hooks, a weight that is sharded between calls of the
    module, or activation checkpointing, which would save the norm as well.

    Args:
        block: the block, with the next norm in ``following``.
    """
    norm = block.following[0] if block.following else None
    if not isinstance(norm, FusedRMSNorm) or not _is_at_hand(norm, x) or not norm.is_supported(x, residual):
        return x + residual
    if block.training and getattr(block, "gradient_checkpointing", False):
        return x + residual
    normed, summed = norm(x, residual)
    norm.remember(summed, normed)
    return summed


def norm_and_add(norm: Any, x: Tensor, residual: Tensor) -> Tensor:
    """Compute ``residual + norm(x)``, in one pass if the norm needs only its weight (`is_plain`)."""
    fused = isinstance(norm, FusedRMSNorm) and x.shape == residual.shape and norm.is_supported(x)
    if not fused or not is_plain(norm, x.shape[-1], x.device):
        return residual + norm(x)
    options = (norm.variance_epsilon, norm.offset, norm.keeps_dtype)
    summed: Tensor = norm_add(x, residual, own_weight(norm), *options)[0]
    return summed


def _is_at_hand(norm: FusedRMSNorm, x: Tensor) -> bool:
    at_hand = not (torch.is_inference_mode_enabled() or norm.weight.is_inference())
    return at_hand and is_plain(norm, x.shape[-1], x.device)


def own_weight(norm: Any) -> Tensor:
    """Return the weight. If all ranks apply the norm to their heads, its gradient is all-reduced over the ranks."""
    weight: Tensor = norm.with_summed_grad("weight") if isinstance(norm, HeadParallelNorm) else norm.weight
    return weight


def is_plain(norm: Any, width: int, device: torch.device) -> bool:
    """Return whether the norm needs only its weight: it is complete, has this width, and the norm has no hooks."""
    weight = norm.weight
    plain = type(weight) is nn.Parameter or bool(getattr(type(weight), "has_plain_storage", False))
    whole = weight.shape == (width,) and weight.device == device
    hooked = norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks
    return plain and whole and not hooked


ON_GPU: dict[str, type] = {
    **dict.fromkeys(RMS_NORMS, FusedRMSNorm),
    **dict.fromkeys(GEMMA_NORMS, FusedGemmaNorm),
    **dict.fromkeys(OLMO2_NORMS, FusedOlmo2Norm),
}
"""The fused class of each root-mean-square norm on a GPU."""

ON_CPU: dict[str, type] = {
    **dict.fromkeys(RMS_NORMS | OLMO2_NORMS, CPURMSNorm),
    **dict.fromkeys(GEMMA_NORMS, CPUGemmaNorm),
}
"""The fused class of each root-mean-square norm on a CPU."""


def layer_of_sharded(cls: type) -> str:
    """Return the transformers layer behind the class of a sharded norm."""
    return layer_name_of(cls.__mro__[cls.__mro__.index(HeadParallelNorm) + 1 :])
