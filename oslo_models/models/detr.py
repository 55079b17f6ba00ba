"""DETR: encoder-decoder over a convolutional backbone, replicated on every rank. Its loss needs scipy."""

from typing import Any, ClassVar

from transformers import DetrConfig
from transformers.models.detr import modeling_detr as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.sharding.layout import EvenSplit

CLASSES_AND_BOXES: Entries = {"class_labels_classifier": Replicated(), "bbox_predictor": Replicated()}


class DetrParallel(ParallelModel):
    """Sharding plan of the DETR family, and base class for families with other attention.

    Attributes:
        images: the modules before the blocks.
        after: the modules after the blocks and between the blocks of the decoder.
        optional: `Plan.optional`.
    """

    images: ClassVar[tuple[str, ...]] = (
        *("backbone", "input_projection", "position_embedding", "query_position_embeddings"),
    )
    after: ClassVar[Entries] = {"decoder.layernorm": Norm()}
    optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def stacks(cls, config: Any) -> dict[str, str]:
        """Return the stacks of blocks, each with ``"encoder"`` or ``"decoder"``."""
        return {f"{stack}.layers": stack for stack in ("encoder", "decoder")}

    @classmethod
    def heads(cls, config: Any, stack: str) -> EvenSplit:
        """Return the attention heads of the encoder or the decoder."""
        count = getattr(config, f"{stack}_attention_heads")
        return EvenSplit(count, config.d_model // count)

    @classmethod
    def attention(cls, config: Any, stack: str, name: str) -> Entries:
        """Return the entries of an attention module inside a block of the encoder or the decoder."""
        heads = cls.heads(config, stack)
        return {**qkv(name, heads), f"{name}.o_proj": RowParallel(heads)}

    @classmethod
    def mlp(cls) -> Entries:
        """Return the entries of the MLP inside a block."""
        return {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}

    @classmethod
    def block(cls, config: Any, stack: str) -> Entries:
        """Return the entries of a block of the encoder or the decoder."""
        block = {**cls.mlp(), "final_layer_norm": Norm()}
        for name in ("self_attn", "encoder_attn") if stack == "decoder" else ("self_attn",):
            block |= {**cls.attention(config, stack, name), f"{name}_layer_norm": Norm()}
        return block

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed=dict.fromkeys(cls.images, Replicated()),
            blocks={name: cls.block(config, stack) for name, stack in cls.stacks(config).items()},
            head=cls.after,
            optional=cls.optional,
        ).with_rules(single_stage_reason="its backbone also computes the mask that all blocks need")


class DetrModel(DetrParallel, hf.DetrModel):
    pass


class DetrForObjectDetection(DetrParallel, hf.DetrForObjectDetection):
    head_plan = CLASSES_AND_BOXES


class DetrForSegmentation(DetrParallel, hf.DetrForSegmentation):
    head_plan = {
        **{f"detr.{name}": entry for name, entry in CLASSES_AND_BOXES.items()},
        "mask_head": Replicated(),
        "bbox_attention": Replicated(),
    }

    def _prefix(self) -> str:
        return "detr.model."  # inside the detection model
