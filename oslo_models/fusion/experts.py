"""Mixtures of experts that compute few tokens on a CPU expert by expert, as in decoding.

Grouped products iterate over all experts of a layer. With few tokens, most experts have none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOST_TOKENS = 16
"""The maximum number of tokens. With more tokens, most experts have some."""


class FusedExperts(nn.Module):
    """A mixin before transformers' class of experts, for unsharded experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if _is_suited(self, hidden_states):
            return few_tokens(self, hidden_states, top_k_index, top_k_weights)
        output: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
        return output


class FusedParallelExperts(nn.Module):
    """A mixin before `ParallelExperts`, for sharded experts."""

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if _is_suited(self, hidden_states):
            return few_tokens(self, hidden_states, top_k_index, top_k_weights)
        output: Tensor = super().compute(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
        return output


def _is_suited(experts: Any, hidden_states: Tensor) -> bool:
    return (
        len(hidden_states) <= MOST_TOKENS
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and hidden_states.dtype == experts.down_proj.dtype
    )


def few_tokens(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, ``[tokens, hidden]``.

    Args:
        experts: a module with the stacked parameters of transformers' experts.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: the experts of each token, ``[tokens, k]``. Experts from ``num_experts`` on are not on this rank. A
            token may have an expert twice.
        top_k_weights: the weights of the experts, ``[tokens, k]``.
    """
    output, (tokens, k) = torch.zeros_like(hidden_states), top_k_index.shape
    choices: dict[int, list[int]] = {}
    for choice, expert in enumerate(top_k_index.flatten().tolist()):
        if expert < experts.num_experts:
            choices.setdefault(expert, []).append(choice)
    weights = top_k_weights.reshape(-1, 1)
    for expert, chosen in choices.items():
        rows = [choice // k for choice in chosen]
        is_for_all = rows == [*range(tokens)]
        y = _mlp(experts, expert, hidden_states if is_for_all else hidden_states[rows]) * weights[chosen]
        if is_for_all:
            output += y
        else:
            output.index_add_(0, torch.tensor(rows), y.to(output.dtype))
    return output


def _mlp(experts: Any, expert: int, x: Tensor) -> Tensor:
    if experts.has_gate:
        x = experts._apply_gate(_linear(experts, "gate_up_proj", expert, x))
    else:
        x = experts.act_fn(_linear(experts, "up_proj", expert, x))
    return _linear(experts, "down_proj", expert, x)


def _linear(experts: Any, name: str, expert: int, x: Tensor) -> Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(x, weight.T if experts.is_transposed else weight, bias)
