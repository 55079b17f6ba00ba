"""Layers of transformers that call the kernels of `oslo_kernels`; `rules` mixes them into the classes of layers.

`norms` and `mlps` have the norms and MLPs, `attention` and `rotary_attention` the attention layers.

Under ``torch.compile``, and for inputs that its kernel does not support, a layer runs transformers' code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from oslo_kernels.dropout import bias_dropout_residual, new_seed
from oslo_kernels.linear import FasterRows, conv1d, linear
from oslo_models.cache_argument import named_arguments
from oslo_models.fusion.norms import FusedLayerNorm, FusedRMSNorm, add_and_norm_ahead, norm_and_add

# Linear layers --------------------------------------------------------------------------------------------------------


class FusedProduct(nn.Module):
    """The product of a sharded ``nn.Linear``, by `oslo_kernels.linear` where it is faster.

    Attributes:
        faster: the numbers of rows to compute there. ``None``: all that the kernel supports.
    """

    faster: FasterRows | None = None

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``."""
        return linear(x, weight, bias, self.faster)


class FusedConv1DProduct(FusedProduct):
    """`FusedProduct` of a sharded ``Conv1D``."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the product of ``Conv1D``."""
        return conv1d(x, weight, bias, self.faster)


class FusedLinear(FusedProduct, nn.Linear):
    """``nn.Linear`` with products of few rows that take only as long as reading the weights."""

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)


class FusedConv1D(FusedConv1DProduct, Conv1D):
    """`FusedLinear` for GPT-2's ``Conv1D``."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


# Activations ----------------------------------------------------------------------------------------------------------


class TanhGELU(NewGELUActivation):
    """``gelu_new`` as one operation instead of eight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


# Residuals ------------------------------------------------------------------------------------------------------------


class FusedLlamaBlock(nn.Module):
    """The block of Llama and of its copies: the pass of the next norm adds each residual.

    Attributes:
        following: the first norm of the next block, or the final norm of the model. Empty if the norm is on another
            pipeline stage.
    """

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    following: tuple[nn.Module, ...]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args or not isinstance(self.post_attention_layernorm, FusedRMSNorm):
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        normed, summed = self.post_attention_layernorm(attended, hidden_states)
        return add_and_norm_ahead(self, self.mlp(normed), summed)


class FusedPhi3Block(nn.Module):
    """`FusedLlamaBlock` with dropout before each residual."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    resid_attn_dropout: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    resid_mlp_dropout: nn.Module
    following: tuple[nn.Module, ...]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args or not isinstance(self.post_attention_layernorm, FusedRMSNorm):
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        normed, summed = self.post_attention_layernorm(self.resid_attn_dropout(attended), hidden_states)
        return add_and_norm_ahead(self, self.resid_mlp_dropout(self.mlp(normed)), summed)


class FusedGemma2Block(nn.Module):
    """The block of Gemma 2 and 3, with norms of the outputs before the residual additions."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    pre_feedforward_layernorm: nn.Module
    mlp: nn.Module
    post_feedforward_layernorm: nn.Module
    following: tuple[nn.Module, ...]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args or not isinstance(self.pre_feedforward_layernorm, FusedRMSNorm):
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        attended = self.post_attention_layernorm(attended)
        normed, summed = self.pre_feedforward_layernorm(attended, hidden_states)
        return add_and_norm_ahead(self, self.post_feedforward_layernorm(self.mlp(normed)), summed)


class FusedOlmo2Block(nn.Module):
    """The block of OLMo 2 and of its copies, with norms of outputs instead of inputs: two passes."""

    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    post_feedforward_layernorm: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args:
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = norm_and_add(self.post_attention_layernorm, attended, hidden_states)
        return norm_and_add(self.post_feedforward_layernorm, self.mlp(hidden_states), hidden_states)


class FusedGPT2Block(nn.Module):
    """`FusedLlamaBlock` for GPT-2."""

    ln_1: nn.Module
    attn: nn.Module
    ln_2: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or not isinstance(self.ln_2, FusedLayerNorm):
            return super().forward(hidden_states, *args, **kwargs)
        given = named_arguments(super().forward, args, kwargs)
        if given.pop("encoder_hidden_states", None) is not None:
            return super().forward(hidden_states, *args, **kwargs)
        given.pop("encoder_attention_mask", None)
        attended, _ = self.attn(self.ln_1(hidden_states), **given)
        normed, summed = self.ln_2(attended, hidden_states)
        return summed + self.mlp(normed)


class FusedGPTNeoBlock(nn.Module):
    """`FusedLlamaBlock` for GPT-Neo."""

    ln_1: nn.Module
    attn: nn.Module
    ln_2: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not isinstance(self.ln_2, FusedLayerNorm):
            return super().forward(hidden_states, *args, **kwargs)
        attended, weights = self.attn(self.ln_1(hidden_states), **named_arguments(super().forward, args, kwargs))
        normed, summed = self.ln_2(attended, hidden_states)
        return summed + self.mlp(normed), weights


class FusedBertOutput(nn.Module):
    """The end of BERT's attention and MLP, and of its copies': dropout, residual and norm in one or two passes."""

    dense: nn.Module
    dropout: nn.Dropout
    LayerNorm: nn.Module

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or not isinstance(self.LayerNorm, FusedLayerNorm):
            return super().forward(hidden_states, input_tensor)
        projected = self.dense(hidden_states)
        if self.training and self.dropout.p:
            return self.LayerNorm(dropout_add(projected, input_tensor, self.dropout.p, True))
        return self.LayerNorm(projected, input_tensor)[0]


class FusedT5FeedForward(nn.Module):
    """T5's MLP with its norm, dropout and residual: the last two in one pass."""

    DenseReluDense: nn.Module
    layer_norm: nn.Module
    dropout: nn.Dropout

    def forward(self, hidden_states: Tensor) -> Tensor:
        projected = self.DenseReluDense(self.layer_norm(hidden_states))
        return dropout_add(projected, hidden_states, self.dropout.p, self.training)


class FusedBloomMLP(nn.Module):
    """BLOOM's MLP, which adds the residual itself: dropout and residual in one pass."""

    dense_h_to_4h: nn.Module
    gelu_impl: nn.Module
    dense_4h_to_h: nn.Module
    pretraining_tp: int
    slow_but_exact: bool
    hidden_dropout: float

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or (self.pretraining_tp > 1 and self.slow_but_exact):
            return super().forward(hidden_states, residual)
        projected = self.dense_4h_to_h(self.gelu_impl(self.dense_h_to_4h(hidden_states)))
        return dropout_add(projected, residual, self.hidden_dropout, self.training)


def dropout_add(x: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    """Compute ``residual + dropout(x)``, as the function of this name in transformers' BLOOM and Falcon."""
    same_kind = x.dtype == residual.dtype and x.shape == residual.shape
    if torch.compiler.is_compiling() or not training or not 0 < prob < 1 or not same_kind:
        return residual + F.dropout(x, prob, training)
    return bias_dropout_residual(x, None, residual, prob, new_seed(x.device))
