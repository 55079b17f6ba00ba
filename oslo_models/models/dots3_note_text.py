"""Dots 3 Note, its text model: DeepSeek-V3.2 with a gate per head, a norm of the rotary key, and sliding windows.

Blocks with sliding windows have no indexer, and may have other heads.
"""

from dataclasses import replace
from typing import Any

from transformers import Dots3NoteTextConfig
from transformers.models.dots3_note import modeling_dots3_note as hf

from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, Plan
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v32 import DeepseekV32Parallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class Dots3NoteParallel(DeepseekV32Parallel):
    """Sharding plan of the text models of the Dots 3 Note family."""

    optional = (*DeepseekV32Parallel.optional, "self_attn.indexer")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {
            **super().attention(config, heads),
            "self_attn.g_proj": ColumnParallel(EvenSplit(config.num_attention_heads)),
            "self_attn.k_rope_only_layernorm": HeadNorm(),  # norm of one key, which each rank uses for its heads
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        each = [config.per_layer_config[block] for block in range(config.num_hidden_layers)]
        overrides = [cls.attention(own, cls.heads(own)) for own in each]
        return replace(super().plan(each[0]), block_overrides={"layers": overrides})


class Dots3NoteTextModel(Dots3NoteParallel, hf.Dots3NoteTextModel):
    pass


class Dots3NoteForCausalLM(Dots3NoteParallel, hf.Dots3NoteForCausalLM):
    head_plan = LM_HEAD
