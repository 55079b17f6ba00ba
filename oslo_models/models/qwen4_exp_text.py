"""Qwen4-Exp, its text model: Qwen3.5 MoE over several streams of hidden states, with n-gram embeddings and an indexer.

Every rank computes the weights of the streams (hyper-connections) in full, because they are for whole streams. Only the
projection to their low rank is sharded. The layers that add n-gram embeddings to the streams are replicated, but their
embeddings, by far the largest weights, are sharded. The indexer's choices are the same for all heads.
"""

from __future__ import annotations

from typing import Any

from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from oslo_models.layers.entries import Entries, Plan, Replicated, VocabParallel
from oslo_models.layers.gathered import GatheredColumn, SlicedRow
from oslo_models.modeling.blocks import of_several_streams
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_5_moe_text import Qwen3_5MoeParallel
from oslo_models.sharding.layout import GroupedHeads


def _mixer(name: str) -> Entries:
    """Return the plan entries for the stream weights of a layer's input, and of its output in the streams."""
    return {name: Replicated(), f"{name}.input_mix_weight_down": SlicedRow()}


class Qwen4ExpParallel(Qwen3_5MoeParallel):
    """Sharding plan of the Qwen4-Exp family."""

    norms = ()
    mlp = {
        **Qwen3_5MoeParallel.mlp,
        **_mixer("attn_hyper_connection"),
        **_mixer("mlp_hyper_connection"),
        "ple": Replicated(),
        "ple.ple_embedding.ngram_embedding": VocabParallel(),
    }
    optional = ("ple", "ple.ple_embedding.ngram_embedding")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {
            **super().attention(config, heads),
            "self_attn.indexer": Replicated(),
            "self_attn.indexer.index_qk_proj": GatheredColumn(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return of_several_streams(super().plan(config), _mixer("hyper_connection_mixer"))


class Qwen4ExpTextModel(Qwen4ExpParallel, hf.Qwen4ExpTextModel):
    pass


class Qwen4ExpForCausalLM(Qwen4ExpParallel, hf.Qwen4ExpForCausalLM):
    head_plan = LM_HEAD
