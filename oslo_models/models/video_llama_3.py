"""VideoLLaMA 3: an encoder of image patches with rotary positions, a projector and Qwen2."""

from dataclasses import replace
from typing import Any

from transformers import VideoLlama3Config, VideoLlama3VisionConfig
from transformers.models.video_llama_3 import modeling_video_llama_3 as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.siglip import SiglipParallel


class PackedPatchesParallel(SiglipParallel):
    """Sharding plan of encoders of the patches of all images as one row, which reshape to their number of heads."""

    encoders = {VISION: ""}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        ((stack, block),) = plan.blocks.items()
        block = {**block, "self_attn": LocalAttributes({"num_heads": heads.local_count})}
        return replace(plan, blocks={stack: block}).with_rules(
            input_positions={}, single_stage_reason="the patches of all images are one row"
        )


class NormedPatchesParallel(PackedPatchesParallel):
    """Sharding plan of encoders of patches with a norm after the blocks."""

    head_plan = {"post_layernorm": Norm()}


class VideoLlama3Parallel(LlavaParallel):
    """Sharding plan of the VideoLLaMA 3 family."""

    towers = {"vision_model": "vision_config"}
    projectors = {"projector": Replicated()}
    classes = {"vision_model": NormedPatchesParallel}


class VideoLlama3Model(VideoLlama3Parallel, hf.VideoLlama3Model):
    pass


class VideoLlama3ForConditionalGeneration(VideoLlama3Parallel, hf.VideoLlama3ForConditionalGeneration):
    head_plan = LM_HEAD
