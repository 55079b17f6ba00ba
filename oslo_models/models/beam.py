"""Beam: Qwen3 MoE with gated attention, four norms per block, and positions in sliding-window blocks only."""

from dataclasses import replace
from typing import Any

from transformers import BeamConfig
from transformers.models.beam import modeling_beam as hf

from oslo_models.layers.entries import ColumnParallel, Entries
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.gemma2 import Gemma2Parallel
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class BeamParallel(LlamaParallel):
    """Sharding plan of the Beam family."""

    norms = Gemma2Parallel.norms
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    mlp = {**LlamaParallel.mlp, **mixture_of_experts()}
    optional = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        gates = {
            "self_attn.gate_proj": ColumnParallel(heads.query),
            "self_attn.gate_bias": ColumnParallel(replace(heads, head_dim=1).query),
        }
        return {**super().attention(config, heads), **gates}


class BeamModel(BeamParallel, hf.BeamModel):
    pass


class BeamForCausalLM(BeamParallel, hf.BeamForCausalLM):
    head_plan = LM_HEAD


if hasattr(hf, "BeamForTokenClassification"):  # since transformers 5.24

    class BeamForTokenClassification(BeamParallel, hf.BeamForTokenClassification):
        head_plan = SCORE
