"""Qwen3-Next: Qwen2 MoE with gated attention in some blocks and gated delta rules, over heads, in the others."""

from dataclasses import replace
from typing import Any

from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, LocalAttributes, Plan, RowParallel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen2_moe import Qwen2MoeParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class Qwen3NextParallel(Qwen2MoeParallel):
    """Sharding plan of the Qwen3-Next family."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        query_and_gate = replace(heads, head_dim=2 * heads.head_dim).query
        gated = {**LlamaParallel.attention(config, heads), "self_attn.q_proj": ColumnParallel(query_and_gate)}
        return {**gated, **cls.linear_attention(config)}

    @classmethod
    def linear_attention(cls, config: Any) -> Entries:
        """Return the plan entries of a gated delta rule, over key heads. Each key head has several value heads."""
        count, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        key, gate = EvenSplit(count, config.linear_key_head_dim), EvenSplit(count, ratio)
        value = EvenSplit(count, ratio * config.linear_value_head_dim)
        local = {"num_k_heads": key.local_count, "num_v_heads": gate.local_extent}
        return {
            "linear_attn": LocalAttributes(
                {**local, "key_dim": key.local_extent, "value_dim": value.local_extent}, convolution="conv1d"
            ),
            **cls.projections(key, value, gate),
            "linear_attn.conv1d.weight": ColumnParallel(key, key, value),  # one filter per channel
            "linear_attn.A_log": ColumnParallel(gate),
            "linear_attn.dt_bias": ColumnParallel(gate),
            "linear_attn.norm": HeadNorm(),
            "linear_attn.out_proj": RowParallel(value),
        }

    @classmethod
    def projections(cls, key: EvenSplit, value: EvenSplit, gate: EvenSplit) -> Entries:
        """Return the plan entries for the query, key, value and gate projections of a gated delta rule."""
        return {
            "linear_attn.in_proj_qkvz": ColumnParallel(EvenSplit(key.count, 2 * key.width + 2 * value.width)),
            "linear_attn.in_proj_ba": ColumnParallel(EvenSplit(gate.count, 2 * gate.width)),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        either = (*cls.attention(config, cls.heads(config)), *cls.head_norms)
        return replace(super().plan(config), optional=(*cls.optional, *either))


class Qwen3NextModel(Qwen3NextParallel, hf.Qwen3NextModel):
    pass


class Qwen3NextForCausalLM(Qwen3NextParallel, hf.Qwen3NextForCausalLM):
    head_plan = LM_HEAD


class Qwen3NextForSequenceClassification(Qwen3NextParallel, hf.Qwen3NextForSequenceClassification):
    head_plan = SCORE


class Qwen3NextForTokenClassification(Qwen3NextParallel, hf.Qwen3NextForTokenClassification):
    head_plan = SCORE


class Qwen3NextForQuestionAnswering(Qwen3NextParallel, hf.Qwen3NextForQuestionAnswering):
    head_plan = QA_OUTPUTS
