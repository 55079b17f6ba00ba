"""Transformers blocks with parallel attention and MLP. One pass adds both outputs and the residual.

Under ``torch.compile`` a block runs transformers' code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oslo_kernels.sums import sum_of_three
from oslo_models.cache_argument import cache_name


def add_both(x: Tensor, y: Tensor, residual: Tensor) -> Tensor:
    """Compute ``x + y + residual``."""
    same = x.dtype == y.dtype == residual.dtype and x.shape == y.shape == residual.shape
    summed: Tensor = sum_of_three(x, y, residual) if same else x + y + residual
    return summed


class FusedNeoXBlock(nn.Module):
    """The block of GPT-NeoX with ``use_parallel_residual``."""

    input_layernorm: nn.Module
    attention: nn.Module
    post_attention_dropout: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    post_mlp_dropout: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args:
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.attention(self.input_layernorm(hidden_states), **kwargs)
        attended = self.post_attention_dropout(attended)
        projected = self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
        return add_both(projected, attended, hidden_states)


class FusedGPTJBlock(nn.Module):
    """The block of GPT-J and CodeGen. Up to transformers 5.23 it returns the weights of its attention too."""

    ln_1: nn.Module
    attn: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args:
            return super().forward(hidden_states, *args, **kwargs)
        normed = self.ln_1(hidden_states)
        attended, weights = self.attn(hidden_states=normed, **kwargs)
        summed = add_both(attended, self.mlp(normed), hidden_states)
        return (summed, weights) if cache_name(super().forward) == "layer_past" else summed


class FusedPhiBlock(nn.Module):
    """The block of Phi, with dropout of both outputs."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module
    resid_dropout: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args:
            return super().forward(hidden_states, *args, **kwargs)
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        attended = self.resid_dropout(attended)
        return add_both(attended, self.resid_dropout(self.mlp(normed)), hidden_states)


class FusedCohereBlock(nn.Module):
    """The block of Cohere."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling() or args:
            return super().forward(hidden_states, *args, **kwargs)
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return add_both(hidden_states, attended, self.mlp(normed))
