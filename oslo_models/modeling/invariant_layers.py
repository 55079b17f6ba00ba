"""Layers for `use_exact_rollouts`: the results of a token do not depend on other tokens, shapes or the number of ranks.

A layer keeps its parameters and gets another class. Its value comes from `oslo_models.layers.invariant_sums`, and its
gradient from the layer's former forward.

Legend:
    N: tokens.
    D: hidden size.
    E: experts.
    K: experts of a token.
    M: pairs of a token and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import layer_context, local_tensor, without_override
from oslo_models.layers.blockwise_attention import blockwise_attention
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.invariant_sums import (
    RoundedWeight,
    WithValue,
    attention,
    lanewise,
    normalized,
    probabilities,
    product,
    products_of_experts,
)
from oslo_models.layers.linear import ColumnParallelLinear, KeyValueParallelLinear, RowParallelLinear
from oslo_models.layers.norm import WidthParallelNorm
from oslo_models.layers.vocab_parallel import VocabParallelHead, VocabParallelLogits
from oslo_models.pipeline.placeholders import Placeholder

INVARIANT = "oslo_models_invariant"
"""The name of `invariant_attention` among transformers' attention functions."""
_POSITIONS = 256
"""Positions of a block of rotary angles. Each angle is computed in a block of this shape."""


def replace(module: nn.Module) -> None:
    """Replace the computation of a module, if the results depend on the shape of its input."""
    own: Any = module
    if is_invariant(module):
        return
    if type(module) in HEADS:
        own.rounded = RoundedWeight()
        own.product = _InvariantProduct(own.rounded, own.in_features)
    elif type(module) in LINEARS:
        own.rounded = RoundedWeight()
        module.__class__ = LINEARS[type(module)]
    elif (mixin := _mixin(module)) is not None:
        if issubclass(mixin, _Rounding):
            own.rounded = RoundedWeight()
            own.rounded_down = RoundedWeight()
        module.__class__ = _joined(mixin, type(module))  # type: ignore[arg-type]


def is_invariant(module: nn.Module) -> bool:
    """Return whether `replace` has replaced the module, or another pipeline stage computes it."""
    kinds = (_InvariantNorm, _InvariantAngles, _InvariantActivation, Placeholder)
    return "rounded" in vars(module) or isinstance(module, kinds)


def rounded_weights(module: nn.Module) -> list[RoundedWeight]:
    """Return the rounded weights that a module can keep."""
    return [each for each in vars(module).values() if isinstance(each, RoundedWeight)]


def _mixin(module: nn.Module) -> type[nn.Module] | None:
    name = type(module).__name__
    if name in _MIXTURES:
        return _MIXTURES[name]
    if name.endswith("RMSNorm"):
        return _InvariantNorm
    if name.endswith("RotaryEmbedding"):
        return _InvariantAngles
    return _InvariantActivation if type(module).__module__ in _ACTIVATIONS else None


_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


@cache
def _joined(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def _with_gradient(plain: Callable[[], Tensor], value: Tensor) -> Tensor:
    """Return a value with the gradient of ``plain()``."""
    return WithValue.apply(plain(), value) if torch.is_grad_enabled() else value


# Linear layers --------------------------------------------------------------------------------------------------------


class _InvariantProduct:
    """``product(x, weight, bias)`` of a layer with all terms of its sums."""

    def __init__(self, kept: RoundedWeight, terms: int) -> None:
        self._kept, self._terms = kept, terms

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, weight, bias, self._kept, self._terms)


class _InvariantLinear(nn.Linear):
    rounded: RoundedWeight

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias, self.rounded, self.in_features)


class _InvariantRowParallelLinear(RowParallelLinear):
    rounded: RoundedWeight

    def forward(self, x: Tensor) -> Tensor:
        terms = self.layouts["weight"].shape[1]
        with layer_context(self.weight):
            y = product(self.leave_region(x), self.weight, None, self.rounded, terms, self.tp)
            return y if self.bias is None else y + self.bias  # the product is a view, which must not change


HEADS = (ColumnParallelLinear, KeyValueParallelLinear, VocabParallelHead)
"""Layers with a replaceable product."""
LINEARS: dict[type, type] = {nn.Linear: _InvariantLinear, RowParallelLinear: _InvariantRowParallelLinear}
"""Layers with another class afterwards."""


# Elementwise functions and norms --------------------------------------------------------------------------------------


class _InvariantNorm(nn.Module):
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            value = self._value(x)
        return _with_gradient(partial(super().forward, x), value)

    def _value(self, x: Tensor) -> Tensor:
        own: Any = self
        epsilon = next(getattr(own, name) for name in ("variance_epsilon", "eps") if hasattr(own, name))
        weight_D = local_tensor(self.weight)
        if isinstance(self, WidthParallelNorm):
            layout = self.layouts["weight"]
            owned = [index[0] for _, index in layout.owned_indices(self.tp.rank)]
            normed = normalized(x, epsilon, layout.shape[0], self.tp, owned)
        else:
            normed = normalized(x, epsilon, x.shape[-1])
        for prefix, scaled in _SCALED.items():
            if type(self).__name__.startswith(prefix):
                return scaled(normed, weight_D).to(x.dtype)
        return weight_D * normed.to(x.dtype)


_SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Gemma": lambda x, weight_D: x * (1.0 + weight_D.float()),
    "Olmo2": lambda x, weight_D: weight_D * x,
}
"""Norms that round after the product with the weight. Other norms round before it."""


class _InvariantActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            value = lanewise(super().forward, input)
        return _with_gradient(partial(super().forward, input), value)


def tanh(x: Tensor) -> Tensor:
    """``torch.tanh`` with `lanewise` results, also of sharded logits."""
    local = x.local() if isinstance(x, VocabParallelLogits) else x
    with torch.no_grad(), without_override():
        value = lanewise(torch.tanh, local)
    found = _with_gradient(local.tanh, value)
    return VocabParallelLogits.from_local(found, x.tp, x.vocab) if isinstance(x, VocabParallelLogits) else found


class _InvariantAngles(nn.Module):
    """Rotary angles, looked up in blocks of fixed shape.

    Attributes:
        tables: sines and cosines by data type and type of layer, grown as needed.
    """

    tables: dict[Any, list[tuple[Tensor, Tensor]]]

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key = x.dtype, *args, *kwargs.values()
        blocks = vars(self).setdefault("tables", {}).setdefault(key, [])
        while len(blocks) * _POSITIONS <= int(position_ids.max()):
            first = len(blocks) * _POSITIONS
            places = torch.arange(first, first + _POSITIONS, device=position_ids.device)[None]
            blocks.append(super().forward(x, places, *args, **kwargs))
        cos, sin = (torch.cat(parts, 1)[0] for parts in zip(*blocks, strict=True))
        return cos[position_ids], sin[position_ids]


# Mixtures of experts --------------------------------------------------------------------------------------------------


class _Rounding(nn.Module):
    """Base of mixins with rounded weights."""

    rounded: RoundedWeight
    rounded_down: RoundedWeight


class _InvariantRouter(_Rounding):
    """Router that chooses the experts with the largest probabilities. Of equal ones, it chooses the first experts."""

    top_k: int
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own: Any = self
        x_ND = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits_NE = product(x_ND, self.weight, None, self.rounded, x_ND.shape[-1])
        with torch.no_grad():
            value_NE = probabilities(logits_NE)
        shares_NE = _with_gradient(partial(logits_NE.float().softmax, -1), value_NE)
        index_NK = value_NE.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        weights_NK = shares_NE.gather(-1, index_NK)
        if getattr(own, "norm_topk_prob", True):
            parts = weights_NK.unbind(-1)
            weights_NK = weights_NK / sum(parts[1:], parts[0]).unsqueeze(-1)  # in this order for every token
        if hasattr(own, "norm_topk_prob"):
            weights_NK = weights_NK.to(logits_NE.dtype)
        return logits_NE, weights_NK, index_NK


class _InvariantExperts(_Rounding):
    gate_up_proj: Tensor
    down_proj: Tensor
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Tensor:
        with torch.no_grad(), without_override():
            value = self._value(hidden_states, top_k_index, top_k_weights)
        return _with_gradient(partial(super().forward, hidden_states, top_k_index, top_k_weights, *args), value)

    def _value(self, x_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        axis: Axis | None = None
        width = self.down_proj.shape[-1]
        if isinstance(self, ParallelExperts):
            axis, width = self.tp, self.layouts["down_proj"].shape[-1]
        count, expert_M = index_NK.shape[-1], index_NK.flatten()
        x_MD = x_ND.repeat_interleave(count, 0)
        gate, up = products_of_experts(x_MD, self.gate_up_proj, expert_M, self.rounded, x_ND.shape[-1]).chunk(2, -1)
        y_MD = products_of_experts(self.act_fn(gate) * up, self.down_proj, expert_M, self.rounded_down, width, axis)
        parts = (y_MD * weights_NK.reshape(-1, 1)).to(x_ND.dtype).view(*index_NK.shape, -1).unbind(1)
        return sum(parts[1:], parts[0])


_MIXTURES: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("MixtralTopKRouter", "Qwen3MoeTopKRouter"), _InvariantRouter),
    **dict.fromkeys(("MixtralExperts", "Qwen3MoeExperts"), _InvariantExperts),
}


# Attention ------------------------------------------------------------------------------------------------------------


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' ``sdpa_attention_forward`` with sums that do not depend on the shapes of the call.

    Args:
        query: ``[batch, heads, queries, width]``.
        key, value: ``[batch, key heads, keys, width]``, or rounded by the running batch.
        attention_mask: ``[batch or 1, 1, queries, keys]``, boolean.
        softcap: bound of the scores.

    Raises:
        ValueError: dropout.
    """
    if dropout:
        raise ValueError(f"attention_dropout={dropout} with exact rollouts: set it to 0, or call eval()")
    config: Any = module.config
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shown = attention_mask if attention_mask is None or attention_mask.dtype is torch.bool else attention_mask == 0
    with torch.no_grad():
        output = attention(query, key, value, shown, scale, config.max_position_embeddings, softcap)
    if torch.is_grad_enabled():
        if softcap is None:
            plain, _ = blockwise_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        else:
            plain = _capped_attention(query, key, value, shown, scale, softcap)
        output = WithValue.apply(plain, output)
    return output, None


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, shown: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Compute attention with bounded scores, as Gemma 2's ``eager_attention_forward``."""
    groups, keys = query.shape[1] // key.shape[1], key.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if shown is None:
        places = torch.arange(keys, device=query.device)
        shown = (places <= places[-query.shape[2] :, None])[None, None]
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    weights = scores.masked_fill(~shown, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32)
    return (weights.to(query.dtype) @ value).transpose(1, 2).contiguous()


AttentionInterface.register(INVARIANT, invariant_attention)
AttentionMaskInterface.register(INVARIANT, sdpa_mask)
