"""LFM3-VL: an encoder of attentions and convolutions over the patches of images, a projector, and LFM3."""

from dataclasses import replace
from typing import Any

from transformers import Lfm3VlConfig, Lfm3VlVisionConfig
from transformers.models.lfm3_vl import modeling_lfm3_vl as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.lfm2 import Lfm2Parallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class Lfm3VlVisionModel(Lfm2Parallel, hf.Lfm3VlVisionModel):
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        channels = EvenSplit(config.hidden_size)
        convolution = {
            "conv.in_proj": ColumnParallel(channels, channels, channels),
            "conv.spatial_conv": LocalAttributes({"groups": channels.local_count}),  # one filter per channel
            "conv.spatial_conv.weight": ColumnParallel(channels),
            "conv.out_proj": RowParallel(channels),
        }
        attention = super().attention(config, heads)
        return {**{name: entry for name, entry in attention.items() if name.startswith("self_attn")}, **convolution}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed = {"patch_embed": Replicated(), "embedding_norm": Norm()}
        return replace(super().plan(config), embed=embed, head={}).with_rules(
            single_stage_reason="the patches of all images are one row"
        )


class Lfm3VlModel(LlavaParallel, hf.Lfm3VlModel):
    pass


class Lfm3VlForConditionalGeneration(LlavaParallel, hf.Lfm3VlForConditionalGeneration):
    head_plan = LM_HEAD
