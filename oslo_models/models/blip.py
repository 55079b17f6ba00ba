"""BLIP: an encoder of image patches, and a decoder with BERT's blocks that reads its outputs."""

from dataclasses import replace
from typing import Any

from transformers import BlipConfig, BlipVisionConfig
from transformers.models.blip import modeling_blip as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.layers.local_attributes import LocalHeads
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of
from oslo_models.models.bert import BertParallel
from oslo_models.models.vit import patch_positions


class BlipVisionParallel(ParallelModel):
    """Sharding plan of the encoder of image patches."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        local = {"num_heads": LocalHeads.of(heads), "embed_dim": heads.local_extent}
        block = {
            "layer_norm1": Norm(),
            "self_attn": LocalAttributes(local),
            "self_attn.qkv": ColumnParallel(heads, heads, heads),
            "self_attn.projection": RowParallel(heads),
            "layer_norm2": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        return Plan(
            embed={"embeddings": Replicated()}, blocks={"encoder.layers": block}, head={"post_layernorm": Norm()}
        ).with_rules(input_positions={"encoder.layers": patch_positions(config.patch_size, extra_positions=1)})


class BlipTextParallel(BertParallel):
    """Sharding plan of the decoder. Every rank holds its vocabulary: it generates by itself."""

    added_embeddings = ("position",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        crossed = {f"cross{name}": entry for name, entry in block.items() if name.startswith("attention.")}
        embed = {**plan.embed, "embeddings.word_embeddings": Replicated()}
        return replace(plan, embed=embed, blocks={"encoder.layer": {**block, **crossed}}, head={})


class BlipVisionModel(BlipVisionParallel, hf.BlipVisionModel):
    pass


class BlipForConditionalGeneration(ParallelModel, hf.BlipForConditionalGeneration):
    head_plan = {"text_decoder.cls": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        vision = BlipVisionParallel.plan(config.vision_config).under("vision_model.")
        text = BlipTextParallel.plan(config.text_config).under("text_decoder.bert.")
        return (vision | text).with_rules(single_stage_reason="a part of it generates by itself")
