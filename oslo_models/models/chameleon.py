"""Chameleon: Llama with norms of each head, and codes of images. Every rank holds the model that makes codes."""

from __future__ import annotations

from typing import Any

from transformers import ChameleonConfig
from transformers.models.chameleon import modeling_chameleon as hf

from oslo_models.layers.entries import Entries, HeadNorm, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class ChameleonParallel(LlamaParallel):
    """Sharding plan of the Chameleon family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        rows = GroupedHeads(heads.query_heads, heads.kv_heads, 1)  # a weight of a norm has a row for each head
        norms = {"self_attn.q_norm": HeadNorm(rows.query), "self_attn.k_norm": HeadNorm(rows.key_value)}
        return {**super().attention(config, heads), **norms}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return Plan({**plan.embed, "vqmodel": Replicated()}, plan.blocks, plan.head).with_rules(
            single_stage_reason="its configuration has no token of images, by which stages would divide them"
        )


class ChameleonModel(ChameleonParallel, hf.ChameleonModel):
    pass


class ChameleonForConditionalGeneration(ChameleonParallel, hf.ChameleonForConditionalGeneration):
    head_plan = LM_HEAD
    loss_needs_full_logits = True  # those of tokens of images are overwritten
