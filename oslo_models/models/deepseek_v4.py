"""DeepSeek-V4: several streams of hidden states, and one key per position that is its value as well for all heads.

Blocks attend to a window. Most blocks also attend to compressed keys of all earlier positions; an indexer may choose a
part of these keys. The output projection has groups of heads: a rank has several groups, or some heads of one group.
Every rank computes the weights of the streams (hyper-connections), the keys and the indexer's choices in full, because
all heads share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    SharedOutput,
)
from oslo_models.modeling.blocks import attention_sinks, mixture_of_experts, of_several_streams
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads, Layout


@dataclass(frozen=True)
class GroupedHeadsProjection(Replicated):
    """Weight ``[groups * out, heads of a group * head_dim]`` that projects each group of heads by itself.

    A rank holds the rows of its groups. If several ranks share a group, each holds the columns of its local heads, and
    its outputs are partial sums. The next layer is row-parallel over the groups.

    Args:
        heads: the heads, with groups in place of key-value heads.
    """

    heads: GroupedHeads

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        heads = self.heads
        rows = Layout.sharded(shape, 0, (replace(heads, head_dim=shape[0] // heads.kv_heads).key_value,), n)
        if n <= heads.kv_heads:
            return rows
        width, own = heads.head_dim, heads.head_ranges(n)
        firsts = [group * heads.group for _, (group, _) in own]
        columns = [((a - first) * width, (b - first) * width) for first, ((a, b), _) in zip(firsts, own, strict=True)]
        return Layout(shape, 1, tuple((range_,) for range_ in columns), first_ranges=rows.ranges)

    def max_ranks(self) -> int | None:
        return self.heads.query_heads


class DeepseekV4Parallel(LlamaParallel):
    """Sharding plan of the DeepSeek-V4 family."""

    mlp = {
        **mixture_of_experts(shared="shared_experts"),
        **dict.fromkeys(("attn_hc", "ffn_hc"), Replicated()),
    }
    optional = ("self_attn.compressor",)

    @classmethod
    def heads(cls, config: Any) -> GroupedHeads:
        return GroupedHeads(config.num_attention_heads, config.o_groups, config.head_dim)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        query, groups = heads.query, replace(heads, head_dim=config.o_lora_rank).key_value
        counts = dict.fromkeys(("num_heads", "num_key_value_groups"), query.local_count)  # with one key for all heads
        return {
            "self_attn": LocalAttributes({**counts, "config.o_groups": groups.local_count}),
            "self_attn.q_a_proj": Replicated(),
            "self_attn.q_a_norm": Norm(),
            "self_attn.q_b_proj": ColumnParallel(query),
            "self_attn.kv_proj": Replicated(),
            "self_attn.kv_norm": SharedOutput(),
            "self_attn.compressor": SharedOutput(),
            "self_attn.sinks": attention_sinks(heads),
            "self_attn.o_a_proj": LocalAttributes({"n_groups": groups.local_count}),
            "self_attn.o_a_proj.weight": GroupedHeadsProjection(heads),
            "self_attn.o_b_proj": RowParallel(groups),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return of_several_streams(plan, {**plan.head, "hc_head": Replicated()})


class DeepseekV4Model(DeepseekV4Parallel, hf.DeepseekV4Model):
    pass


class DeepseekV4ForCausalLM(DeepseekV4Parallel, hf.DeepseekV4ForCausalLM):
    head_plan = LM_HEAD
