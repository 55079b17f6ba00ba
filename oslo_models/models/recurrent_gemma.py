"""RecurrentGemma (Griffin): Gemma with gated linear recurrences, over the blocks of their gates, in most blocks."""

from __future__ import annotations

from typing import Any

from transformers import RecurrentGemmaConfig
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    RowParallel,
    StateSpace,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit


class RecurrentGemmaParallel(ParallelModel):
    """Sharding plan of the RecurrentGemma family."""

    @classmethod
    def recurrence(cls, config: Any) -> Entries:
        """Return the plan entries of a recurrence. Its gates have one square block per attention head."""
        count = config.num_attention_heads
        channels, gates = EvenSplit(count, config.lru_width // count), EvenSplit(count)
        unit, conv = "temporal_block.rg_lru", "temporal_block.conv_1d"
        weights = [f"{gate}_gate_{kind}" for gate in ("input", "recurrent") for kind in ("weight", "bias")]
        return {
            # The state of the convolution is as wide as its input, so it has hidden_size channels.
            "temporal_block": StateSpace(
                dict.fromkeys(("lru_width", "hidden_size"), channels.local_extent), convolution="conv_1d"
            ),
            "temporal_block.linear_y": ColumnParallel(channels),
            "temporal_block.linear_x": ColumnParallel(channels),
            conv: LocalAttributes({"groups": channels.local_extent}),
            f"{conv}.weight": ColumnParallel(channels),  # one filter per channel
            f"{conv}.bias": ColumnParallel(channels),
            unit: LocalAttributes({"num_attention_heads": gates.local_count}),
            f"{unit}.recurrent_param": ColumnParallel(channels),
            **{f"{unit}.{name}": ColumnParallel(gates) for name in weights},
            "temporal_block.linear_out": RowParallel(channels),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        attention = LlamaParallel.attention(config, LlamaParallel.heads(config))
        recurrent = cls.recurrence(config)
        sliding = {name.replace("self_attn", "temporal_block"): entry for name, entry in attention.items()}
        kinds: dict[str, Entries] = {
            **{"linear_attention": recurrent, "sliding_attention": sliding},
            **{"recurrent": recurrent, "attention": sliding},  # their names in transformers 5.17
        }
        norms = {name: Norm() for name in ("temporal_pre_norm", "channel_pre_norm")}
        return Plan(
            embed={"embed_tokens": VocabParallel()},
            blocks={"layers": {**gated_mlp("mlp_block"), **norms}},
            block_overrides={"layers": [kinds[kind] for kind in config.layers_block_type]},
            head={"final_norm": Norm()},
        ).with_rules(
            single_stage_reason="its embeddings are scaled by a buffer that transformers sets whenever a model is made"
        )


class RecurrentGemmaModel(RecurrentGemmaParallel, hf.RecurrentGemmaModel):
    pass


class RecurrentGemmaForCausalLM(RecurrentGemmaParallel, hf.RecurrentGemmaForCausalLM):
    head_plan = LM_HEAD
