"""Gemma 3n, its text model: Gemma 3 over several streams of hidden states (AltUp), with an input of each block's own.

Every rank computes the per-block inputs, the streams and the low-rank residual (LAuReL) in full. Sparse blocks cut off
their gates at a number of standard deviations. The statistics are computed over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n import modeling_gemma3n as hf

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.layers.entries import Entries, Norm, Plan, Replicated, VocabParallel
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.kinds import ShardedModule, shards
from oslo_models.layers.linear import ColumnParallelLinear
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.gemma3_text import Gemma3Parallel


@dataclass(frozen=True)
class GlobalMoments(Replicated):
    """Module that takes mean, standard deviation or sum of a sharded activation over the features of all ranks."""

    has_parameters: ClassVar[bool] = False


@shards(GlobalMoments)
class GlobalMomentsLayer(ShardedModule):
    """Module that calls ``torch.mean``, ``torch.std`` or ``Tensor.sum`` on an activation ``[..., local features]``.

    All are taken over the features of all ranks. For mean and standard deviation, one of its column-parallel layers
    outputs these features.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layers = (layer for layer in self.modules() if isinstance(layer, ColumnParallelLinear))
        width = next((layer.layouts["weight"].shape[0] for layer in layers), 0)

        def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
            return copy_to(self.tp, reduce_from(self.tp, x.sum(dim, keepdim)))

        def mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
            return total(x, dim, keepdim) / width

        def std(x: Tensor, dim: int, keepdim: bool = False, unbiased: bool = True) -> Tensor:
            squares = (x - mean(x, dim, True)).square()
            return (mean(squares, dim, keepdim) * (width / (width - unbiased))).sqrt()

        with FunctionOverrides({torch.mean: mean, torch.std: std, Tensor.sum: total}):
            return super().forward(*args, **kwargs)


class Gemma3nParallel(Gemma3Parallel):
    """Sharding plan of the Gemma 3n family."""

    norms = (*Gemma3Parallel.norms, "post_per_layer_input_norm", "laurel.post_laurel_norm", "altup.router_norm")
    head_norms = (*Gemma3Parallel.head_norms, "self_attn.v_norm")
    mlp = {
        **Gemma3Parallel.mlp,
        "mlp": GlobalMoments(),
        **dict.fromkeys(("per_layer_input_gate", "per_layer_projection"), Replicated()),
        **dict.fromkeys(("laurel.linear_left", "laurel.linear_right", "altup"), Replicated()),
        **{f"altup.{name}": Replicated() for name in ("correction_coefs", "prediction_coefs", "modality_router")},
    }
    optional = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, streams = super().plan(config), range(config.altup_num_inputs - 1)
        inputs: Entries = {
            "embed_tokens_per_layer": VocabParallel(),
            "per_layer_model_projection": Replicated(),
            "per_layer_projection_norm": Norm(),
        }
        return replace(
            plan,
            embed={**plan.embed, **inputs, **{f"altup_projections.{i}": Replicated() for i in streams}},
            head={**plan.head, **{f"altup_unembed_projections.{i}": Replicated() for i in streams}},
        ).with_rules(
            single_stage_reason="hidden states have several streams, and blocks need what earlier modules made"
        )


class Gemma3nTextModel(Gemma3nParallel, hf.Gemma3nTextModel):
    pass


class Gemma3nForCausalLM(Gemma3nParallel, hf.Gemma3nForCausalLM):
    head_plan = LM_HEAD
