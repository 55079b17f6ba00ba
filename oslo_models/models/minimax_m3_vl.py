"""MiniMax-M3: CLIP's encoder over the patches of images and videos, a projector, and the text model."""

from dataclasses import replace
from typing import Any

from transformers import MiniMaxM3VLConfig, MiniMaxM3VLVisionConfig
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as hf

from oslo_models.layers.entries import Plan
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import CLIPParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.minimax_m3_vl_text import MiniMaxM3VLTextModel
from oslo_models.models.video_llama_3 import PackedPatchesParallel


class MiniMaxM3VLVisionModel(PackedPatchesParallel, hf.MiniMaxM3VLVisionModel):
    image_embed = CLIPParallel.image_embed

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        return replace(plan, blocks={"layers": block})


class MiniMaxM3WithImagesParallel(LlavaParallel):
    """Sharding plan of the MiniMax-M3 family with images."""

    classes = {"vision_tower": MiniMaxM3VLVisionModel, "language_model": MiniMaxM3VLTextModel}


class MiniMaxM3VLModel(MiniMaxM3WithImagesParallel, hf.MiniMaxM3VLModel):
    pass


class MiniMaxM3SparseForConditionalGeneration(MiniMaxM3WithImagesParallel, hf.MiniMaxM3SparseForConditionalGeneration):
    head_plan = LM_HEAD
