"""MiniMax-M3, its text model: Qwen3 with shared and routed experts; in some blocks, an indexer chooses blocks of keys.

On more than one rank, the number of index heads must equal the number of key-value heads. Each index head chooses for
the query heads of one key-value head, and is on the ranks with this key-value head. All index heads share one key,
computed in full on every rank. Indexers get no gradients.
"""

from dataclasses import replace
from typing import Any

from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as hf

from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, LocalAttributes, Plan, Replicated
from oslo_models.modeling.blocks import gated_mlp, mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3 import Qwen3Parallel
from oslo_models.sharding.layout import GroupedHeads


class MiniMaxM3VLParallel(Qwen3Parallel):
    """Sharding plan of the MiniMax-M3 family."""

    mlp = {**gated_mlp("mlp", fused=True), **mixture_of_experts(shared="shared_experts", fused=True)}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), **cls.indexer(replace(heads, head_dim=config.index_head_dim))}

    @classmethod
    def indexer(cls, heads: GroupedHeads) -> Entries:
        """Return the plan entries of an indexer.

        Args:
            heads: the attention heads, with the width of an index head.
        """
        count = {"num_heads": heads.key_value.local_count, "config.num_attention_heads": heads.query.local_count}
        return {
            "self_attn.indexer": LocalAttributes(count),
            "self_attn.indexer.q_proj": ColumnParallel(heads.key_value),
            "self_attn.indexer.q_norm": HeadNorm(),
            "self_attn.indexer.k_proj": Replicated(),
            "self_attn.indexer.k_norm": Replicated(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, counts = super().plan(config), (config.index_n_heads, config.num_key_value_heads)
        differs = "minimax_m3_sparse" in config.layer_types and counts[0] != counts[1]
        return replace(
            plan,
            optional=(*cls.mlp, *cls.indexer(cls.heads(config))),
            single_rank_reason="index_n_heads={} is not num_key_value_heads={}".format(*counts) if differs else "",
        )


class MiniMaxM3VLTextModel(MiniMaxM3VLParallel, hf.MiniMaxM3VLTextModel):
    pass


class MiniMaxM3VLForCausalLM(MiniMaxM3VLParallel, hf.MiniMaxM3VLForCausalLM):
    head_plan = LM_HEAD
