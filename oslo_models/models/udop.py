"""UDOP: T5 with an encoder that also reads patches of an image, and places of tokens and patches on the page."""

from dataclasses import replace
from typing import Any

from transformers import UdopConfig
from transformers.models.udop import modeling_udop as hf

from oslo_models.layers.entries import ColumnParallel, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.t5 import T5Parallel
from oslo_models.sharding.layout import EvenSplit


class UdopParallel(T5Parallel):
    """Sharding plan of the UDOP family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), EvenSplit(config.num_heads)
        biases = {
            f"{stack}.relative_bias.biases.{number}.relative_attention_bias": ColumnParallel(heads, transposed=True)
            for stack in cls.stacks
            for number in range(len(config.relative_bias_args))
        }
        patches = ("patch_embed", "encoder.cell_2d_embedding", *(f"{stack}.embed_patches" for stack in cls.stacks))
        embed = {**plan.embed, **dict.fromkeys(patches, Replicated()), **biases}
        return replace(plan, embed=embed).with_rules(
            single_stage_reason="the biases of its attention depend on the places of tokens on the page"
        )


class UdopModel(UdopParallel, hf.UdopModel):
    pass


class UdopForConditionalGeneration(UdopParallel, hf.UdopForConditionalGeneration):
    head_plan = LM_HEAD


class UdopEncoderModel(UdopParallel, hf.UdopEncoderModel):
    stacks = ("encoder",)
