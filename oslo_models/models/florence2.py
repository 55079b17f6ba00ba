"""Florence-2: an encoder with attention over windows and over channels (DaViT), a projector and BART."""

from typing import Any

from transformers import Florence2Config, Florence2VisionConfig
from transformers.models.florence2 import modeling_florence2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.layers.local_attributes import LocalHeads
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import EvenSplit


class DaViTParallel(ParallelModel):
    """Sharding plan of the encoder."""

    @staticmethod
    def half(block: str, attention: str, attribute: str, heads: EvenSplit) -> Entries:
        """Return the plan of one half of a block: an attention, with heads or groups of channels, and an MLP."""
        return {
            **{f"{block}.{name}": Replicated() for name in ("conv1", "conv2")},
            **{f"{block}.{name}": Norm() for name in ("norm1", "norm2")},
            f"{block}.{attention}": LocalAttributes({attribute: LocalHeads.of(heads)}, width=heads),
            f"{block}.{attention}.qkv": ColumnParallel(heads, heads, heads),
            f"{block}.{attention}.proj": RowParallel(heads),
            f"{block}.ffn.fc1": ColumnParallel(),
            f"{block}.ffn.fc2": RowParallel(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        blocks = {}
        for stage, width in enumerate(config.embed_dim):
            heads, groups = (
                EvenSplit(each[stage], width // each[stage]) for each in (config.num_heads, config.num_groups)
            )
            spatial = cls.half("spatial_block", "window_attn", "num_heads", heads)
            blocks[f"blocks.{stage}"] = {**spatial, **cls.half("channel_block", "channel_attn", "groups", groups)}
        return Plan(embed={"convs": Replicated()}, blocks=blocks, head={}).with_rules(
            single_stage_reason="patches are merged between its blocks"
        )


class Florence2Parallel(LlavaParallel):
    """Sharding plan of the Florence-2 family."""

    classes = {"vision_tower": DaViTParallel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="images are among the tokens of its encoder")


class Florence2Model(Florence2Parallel, hf.Florence2Model):
    pass


class Florence2ForConditionalGeneration(Florence2Parallel, hf.Florence2ForConditionalGeneration):
    head_plan = LM_HEAD
