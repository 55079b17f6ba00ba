"""`use_exact_rollouts`: log-probabilities of sampled tokens that training computes again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from typing_extensions import Self

from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.blockwise_attention import blockwise_attention
from oslo_models.layers.invariant_sums import (
    RoundedWeight,
    WithValue,
    attention,
    lanewise,
    log_probabilities,
    product,
    root_mean_square_norm,
)
from oslo_models.layers.linear import ColumnParallelLinear, RowParallelLinear, add_bias
from oslo_models.layers.vocab_parallel import VocabParallelHead, VocabParallelLogits

TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with the layers that are replaced here."""
INVARIANT = "oslo_models_invariant"
"""The name of `invariant_attention` among transformers' attention functions."""
_POSITIONS = 256
"""Positions of a block of rotary angles. Each angle is computed in a block of this shape."""


class ExactRollouts(PreTrainedModel):
    """The part of `ParallelModel` for exact rollouts.

    Attributes:
        has_exact_rollouts: whether `use_exact_rollouts` was called.
    """

    has_exact_rollouts = False

    def use_exact_rollouts(self) -> Self:
        """Compute log-probabilities that do not depend on the batch, for reinforcement learning. Return the model.

        Afterwards, the log-probability that `generate_batch` returns for a sampled token (``return_logprobs`` of
        ``ContinuousBatchingConfig``) equals bit for bit the one that a training forward computes with the same weights:
        in any batch, with any padding and chunks of prompts, and on any ``tensor_parallel_size``. So the importance
        ratio of the first update is 1. The training forward is TRL's (`oslo_models.integrations.GRPOTrainer`), or
        `token_log_probabilities` of its logits. The settings of ``generate`` may change the temperature only, because
        training knows no other setting.

        Products, norms, attention and softmax add integers in float64, whose sums are exact; see
        `oslo_models.layers.invariant_sums`. Gradients are the ordinary ones. Forwards take two to three times as long.
        Outputs differ from the model's former ones by rounding.

        Call it again after LoRA adapters were added.

        Raises:
            ValueError: the model type, device or number type is not supported; or the model is fused, or has
                adapters other than LoRA, or fewer key-value heads than tensor-parallel ranks. On every rank.
        """
        if (reason := _reason_against(self)) is not None:
            raise ValueError(f"use_exact_rollouts does not support this {type(self).__name__}: {reason}")
        for module in self.modules():
            _replace(module)
        self.set_attn_implementation(INVARIANT)
        self.has_exact_rollouts = True
        return self

    @staticmethod
    def token_log_probabilities(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Tensor:
        """Return the log-probabilities of tokens, ``[...]``, for training a model with `use_exact_rollouts`.

        Args:
            logits: of a forward of the model, ``[..., vocabulary]``.
            target: indices into the vocabulary, ``[...]``.
            temperature: of the rollout.
        """
        axis, local, start = None, logits, 0
        if isinstance(logits, VocabParallelLogits):
            axis, local = logits.tp, logits.local()
            ((start, _),) = logits.vocab.ranges[axis.rank]
        with torch.no_grad():
            scores_NV = local.float().flatten(0, -2) / temperature
            value = log_probabilities(scores_NV, target.flatten(), axis, start).view(target.shape)
        if not torch.is_grad_enabled():
            return value
        scores = logits.reshape(-1, logits.shape[-1]) / temperature
        plain = -F.cross_entropy(scores, target.flatten(), reduction="none")
        found: Tensor = WithValue.apply(plain.view(target.shape), value)
        return found

    @contextmanager
    def _keeping_rounded_weights(self) -> Iterator[None]:
        """Context in which products keep the rounded weights. Their memory is free afterwards."""
        modules = self.modules() if self.has_exact_rollouts else ()
        kept: list[RoundedWeight] = [vars(module)["rounded"] for module in modules if "rounded" in vars(module)]
        for each in kept:
            each.keeps = True
        try:
            yield
        finally:
            for each in kept:
                each.release()


def _reason_against(model: Any) -> str | None:
    kind, types = model.config.model_type, {param.dtype for param in model.parameters()}
    if kind not in TYPES:
        return f"its type {kind} is none of {', '.join(TYPES)}"
    if getattr(model, "_fusion", None) is not None:
        return "it is fused, and fused kernels sum in other orders; call it before fuse(), or not at all"
    if not types <= {torch.float32, torch.bfloat16} or len(types) != 1:
        return f"its weights are {', '.join(sorted(map(str, types)))}; load it with dtype=torch.float32 or bfloat16"
    if model.device.type not in ("cpu", "cuda"):
        return f"it is on {model.device.type}, where this was not tested; load it on a CPU or a GPU"
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return f"its rotary positions depend on the longest sequence of a batch (rope_type {rope['rope_type']})"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_invariant(module) and type(module) not in (*_LINEARS, *_HEADS):
            advice = "quantised weights and fewer key-value heads than tensor-parallel ranks are not supported"
            return f"{name} is a {type(module).__name__}: {advice}"
        bases = {base.__name__ for base in type(module).__mro__}
        if "BaseTunerLayer" in bases and ("LoraLayer" not in bases or any(module.use_dora.values())):
            return f"{name} is a {type(module).__name__}: adapters other than LoRA are not supported"
    return None


def reason_of_layers(model: nn.Module) -> str | None:
    """Return which layer was added after `use_exact_rollouts`; ``None`` for no layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not _is_invariant(module):
            return f"{name} was added after use_exact_rollouts: call it again"
    return None


# Layers ---------------------------------------------------------------------------------------------------------------


def _replace(module: nn.Module) -> None:
    """Replace the computation of a module, if the results depend on the shape of its input."""
    own: Any = module
    if _is_invariant(module):
        return
    if type(module) in _HEADS:
        own.rounded = RoundedWeight()
        own.product = _InvariantProduct(own.rounded, own.in_features)
    elif type(module) in _LINEARS:
        own.rounded = RoundedWeight()
        module.__class__ = _LINEARS[type(module)]
    elif (mixin := _mixin(module)) is not None:
        module.__class__ = _joined(mixin, type(module))  # type: ignore[arg-type]


def _is_invariant(module: nn.Module) -> bool:
    return "rounded" in vars(module) or isinstance(module, (_InvariantNorm, _InvariantAngles, _InvariantActivation))


def _mixin(module: nn.Module) -> type[nn.Module] | None:
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return _InvariantNorm
    if name.endswith("RotaryEmbedding"):
        return _InvariantAngles
    return _InvariantActivation if type(module).__module__ in _ACTIVATIONS else None


_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


@cache
def _joined(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


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
            return add_bias(product(self.leave_region(x), self.weight, None, self.rounded, terms, self.tp), self.bias)


_HEADS = (ColumnParallelLinear, VocabParallelHead)
"""Layers with a replaceable product."""
_LINEARS: dict[type, type] = {nn.Linear: _InvariantLinear, RowParallelLinear: _InvariantRowParallelLinear}
"""Layers with another class afterwards."""


class _InvariantNorm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        with torch.no_grad():
            value = root_mean_square_norm(hidden_states, self.weight, self.variance_epsilon)
        return _with_gradient(super().forward, hidden_states, value)


class _InvariantActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            value = lanewise(super().forward, input)
        return _with_gradient(super().forward, input, value)


def _with_gradient(plain: Callable[[Tensor], Tensor], x: Tensor, value: Tensor) -> Tensor:
    """Return a value with the gradient of ``plain(x)``."""
    return WithValue.apply(plain(x), value) if torch.is_grad_enabled() else value


class _InvariantAngles(nn.Module):
    """Rotary angles, looked up in blocks of fixed shape.

    Attributes:
        tables: sines and cosines by data type, grown as needed.
    """

    tables: dict[torch.dtype, list[tuple[Tensor, Tensor]]]

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        blocks = vars(self).setdefault("tables", {}).setdefault(x.dtype, [])
        while len(blocks) * _POSITIONS <= int(position_ids.max()):
            first = len(blocks) * _POSITIONS
            places = torch.arange(first, first + _POSITIONS, device=position_ids.device)[None]
            blocks.append(super().forward(x, places))
        cos, sin = (torch.cat(parts, 1)[0] for parts in zip(*blocks, strict=True))
        return cos[position_ids], sin[position_ids]


def invariant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' ``sdpa_attention_forward`` with sums that do not depend on the shapes of the call.

    Args:
        query: ``[batch, heads, queries, width]``.
        key, value: ``[batch, key heads, keys, width]``, or rounded by the running batch.
        attention_mask: ``[batch or 1, 1, queries, keys]``, boolean.

    Raises:
        ValueError: dropout.
    """
    if dropout:
        raise ValueError(f"attention_dropout={dropout} with exact rollouts: set it to 0, or call eval()")
    config: Any = module.config
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shown = attention_mask if attention_mask is None or attention_mask.dtype is torch.bool else attention_mask == 0
    with torch.no_grad():
        output = attention(query, key, value, shown, scale, config.max_position_embeddings)
    if torch.is_grad_enabled():
        plain, _ = blockwise_attention(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        output = WithValue.apply(plain, output)
    return output, None


AttentionInterface.register(INVARIANT, invariant_attention)
AttentionMaskInterface.register(INVARIANT, sdpa_mask)
