"""Kimi Linear: DeepSeek-V3 without positions, and with gated delta rules, over heads, in place of most attentions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, LocalAttributes, Plan, Replicated, RowParallel
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel
from oslo_models.sharding.layout import EvenSplit


class KimiLinearParallel(DeepseekV2Parallel):
    """Sharding plan of the Kimi Linear family."""

    @classmethod
    def linear_attention(cls, config: Any) -> Entries:
        """Return the plan entries of a gated delta rule."""
        heads, each = EvenSplit(config.linear_num_heads, config.linear_head_dim), EvenSplit(config.linear_num_heads)
        return {
            "self_attn": LocalAttributes({"qkv_dim": heads.local_extent}),
            **qkv("self_attn", heads),
            "self_attn.conv1d.weight": ColumnParallel(heads, heads, heads),  # one filter per channel
            "self_attn.forget_gate": LocalAttributes({"num_heads": each.local_count}),
            "self_attn.forget_gate.dt_bias": ColumnParallel(heads),
            **cls.gates(heads, each),
            "self_attn.b_proj": ColumnParallel(each),
            "self_attn.o_norm": HeadNorm(),
            "self_attn.o_proj": RowParallel(heads),
        }

    @classmethod
    def gates(cls, heads: EvenSplit, each: EvenSplit) -> Entries:
        """Return the plan entries of the low-rank forget gates and output gates."""
        return {
            "self_attn.forget_gate.A_log": ColumnParallel(each, dim=2),
            "self_attn.forget_gate.f_a_proj": Replicated(),
            "self_attn.forget_gate.f_b_proj": ColumnParallel(heads),
            "self_attn.g_a_proj": Replicated(),
            "self_attn.g_b_proj": ColumnParallel(heads),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        attention = cls.attention(config, cls.heads(config))
        kinds = {"full_attention": attention, "linear_attention": cls.linear_attention(config)}
        return replace(
            plan,
            blocks={"layers": {name: entry for name, entry in plan.blocks["layers"].items() if name not in attention}},
            block_overrides={"layers": [kinds[kind] for kind in config.layer_types]},
        )


class KimiLinearModel(KimiLinearParallel, hf.KimiLinearModel):
    pass


class KimiLinearForCausalLM(KimiLinearParallel, hf.KimiLinearForCausalLM):
    head_plan = LM_HEAD
