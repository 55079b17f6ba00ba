"""`use_exact_rollouts`: log-probabilities of sampled tokens that training computes again, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import Self

from oslo_models.distributed.object_exchange import agree
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.invariant_sums import WithValue, log_probabilities, product
from oslo_models.layers.vocab_parallel import VocabParallelLogits
from oslo_models.modeling.invariant_layers import (
    HEADS,
    INVARIANT,
    LINEARS,
    is_invariant,
    replace,
    rounded_weights,
    tanh,
)

TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text"),
    *("glm4", "granite", "olmo2", "phi3", "smollm3"),
)
"""Model types with the layers that are replaced here."""


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

        On pipeline stages, only the last stage has logits: set a ``loss_function`` that calls
        `token_log_probabilities`, and pass the log-probabilities of the rollout to the model beside the labels.

        Products, norms, attention, softmax and the choice of experts add integers in float64, whose sums are exact; see
        `oslo_models.layers.invariant_sums`. Gradients are the ordinary ones. Forwards take two to three times as long.
        Outputs differ from the model's former ones by rounding.

        Call it again after LoRA adapters were added. The trainers of `oslo_models.integrations` do so.

        Raises:
            ValueError: the model type, device or number type is not supported; or the model is a full one, is fused,
                has dropout, sequence parallelism or experts on different ranks, or has adapters other than LoRA. On
                every rank.
        """
        mesh: Any = getattr(self, "mesh", None)
        with nullcontext() if mesh is None else agree(mesh.model, "checking the layers of use_exact_rollouts"):
            if (reason := _reason_against(self)) is not None:
                raise ValueError(f"use_exact_rollouts does not support this {type(self).__name__}: {reason}")
        for module in self.modules():
            replace(module)
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

    def _local_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits as `forward` does, without gradients: ``[..., local vocabulary]``."""
        head: Any = self.get_output_embeddings()
        config = self.config.get_text_config()
        logits = product(hidden, head.weight, head.bias, head.rounded, head.in_features)
        if (divisor := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (softcap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = tanh(logits / softcap) * softcap
        return logits

    def _invariant_functions(self) -> Any:
        """Return a context for transformers' forward. It replaces functions that no layer contains."""
        if not self.has_exact_rollouts:
            return nullcontext()
        softcap = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        return nullcontext() if softcap is None else FunctionOverrides({torch.tanh: tanh})

    @contextmanager
    def _keeping_rounded_weights(self) -> Iterator[None]:
        """Context in which products keep the rounded weights. Their memory is free afterwards."""
        modules = self.modules() if self.has_exact_rollouts else ()
        kept = [each for module in modules for each in rounded_weights(module)]
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
    if getattr(model, "mesh", None) is None:
        return "it is a full model; load it by from_pretrained_with_parallel, also for one process"
    if getattr(model, "_fusion", None) is not None:
        return "it is fused, and fused kernels sum in other orders; call it before fuse(), or not at all"
    if getattr(model, "token_division", None) is not None:
        return f"it was loaded with {model.token_division.option}; leave it out"
    if not types <= {torch.float32, torch.bfloat16}:
        return f"its weights are {', '.join(sorted(map(str, types)))}; load it with dtype=torch.float32 or bfloat16"
    if model.device.type not in ("cpu", "cuda"):
        return f"it is on {model.device.type}, where this was not tested; load it on a CPU or a GPU"
    if getattr(model.config, "use_bidirectional_attention", False):
        return "use_bidirectional_attention=True: its tokens see later ones"
    if (jitter := getattr(model.config, "router_jitter_noise", 0.0)) > 0:
        return f"its router adds noise in training (router_jitter_noise={jitter}); set it to 0"
    if (reason := _reason_of_positions(model.config)) is not None:
        return reason
    reasons = (_reason_of_module(name, module) for name, module in model.named_modules())
    return next((reason for reason in reasons if reason is not None), None)


def _reason_of_positions(config: Any) -> str | None:
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(each for each in rope.values() if isinstance(each, dict))):  # Gemma 3 has two kinds
        if each.get("rope_type") in ("dynamic", "longrope"):
            return f"its rotary positions depend on the longest sequence of a batch (rope_type {each['rope_type']})"
    return None


def _reason_of_module(name: str, module: nn.Module) -> str | None:
    kind, bases = type(module).__name__, {base.__name__ for base in type(module).__mro__}
    if isinstance(module, nn.Linear) and not is_invariant(module) and type(module) not in (*LINEARS, *HEADS):
        return f"{name} is a {kind}: quantised weights are not supported"
    if isinstance(module, nn.Dropout) and module.p > 0:
        return f"{name} drops activations in training (p={module.p}); set the rate to 0"
    if isinstance(module, ParallelExperts) and (module.over_ranks or module.mesh.has_experts_over_replicas):
        return f"the ranks have different experts of {name}; load it with expert_parallel_size=1"
    is_plain_lora = (
        "LoraLayer" in bases and "ParamWrapper" not in bases and not any(getattr(module, "use_dora", {}).values())
    )
    if "BaseTunerLayer" in bases and not is_plain_lora:
        return f"{name} is a {kind}: adapters other than LoRA of linear layers are not supported"
    return None


def reason_of_layers(model: nn.Module) -> str | None:
    """Return which layer was added after `use_exact_rollouts`; ``None`` for no layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not is_invariant(module):
            return f"{name} was added after use_exact_rollouts: call it again"
    return None
