"""Qwen2-VL: an encoder of image patches, and a decoder whose positions have a time, a height and a width."""

from typing import Any, ClassVar

from transformers import Qwen2VLConfig, Qwen2VLTextConfig
from transformers.models.qwen2_vl import modeling_qwen2_vl as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import EvenSplit


class QwenEncoderParallel(ParallelModel):
    """Sharding plan of the encoders of image patches in Qwen's models.

    Attributes:
        qkv: the projections of attention, or the one that joins them.
        mlp: the entries of the MLP of a block.
        positions: the modules beside the embedding of patches.
        mergers: the modules that merge neighbouring patches.
    """

    qkv: ClassVar[tuple[str, ...]] = ("qkv",)
    mlp: ClassVar[Entries] = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}
    positions: ClassVar[Entries] = {}
    mergers: ClassVar[Entries] = {"merger": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        width = getattr(config, "embed_dim", config.hidden_size)  # Qwen2-VL calls the decoder's width hidden_size
        heads = EvenSplit(config.num_heads, width // config.num_heads)
        block = {
            "norm1": Norm(),
            "attn": LocalAttributes({"num_heads": heads.local_count}),
            **{f"attn.{name}": ColumnParallel(*[heads] * (3 // len(cls.qkv))) for name in cls.qkv},
            "attn.proj": RowParallel(heads),
            "norm2": Norm(),
            **cls.mlp,
        }
        return Plan(
            embed={"patch_embed": Replicated(), **cls.positions}, blocks={"blocks": block}, head=cls.mergers
        ).with_rules(single_stage_reason="the patches of all images are one row")


class Qwen2VisionTransformerPretrainedModel(QwenEncoderParallel, hf.Qwen2VisionTransformerPretrainedModel):
    pass


class QwenWithImagesParallel(LlavaParallel):
    """Sharding plan of Qwen's models of text and images. Their encoders project to the width of the decoder."""

    towers = {"visual": "vision_config"}
    projectors = {}


class Qwen2VLParallel(QwenWithImagesParallel):
    """Sharding plan of the Qwen2-VL family."""

    classes = {"visual": Qwen2VisionTransformerPretrainedModel}


class Qwen2VLTextModel(LlamaParallel, hf.Qwen2VLTextModel):
    pass


class Qwen2VLModel(Qwen2VLParallel, hf.Qwen2VLModel):
    pass


class Qwen2VLForConditionalGeneration(Qwen2VLParallel, hf.Qwen2VLForConditionalGeneration):
    head_plan = LM_HEAD
