"""MiniCPM-V 4.6: the encoder of SigLIP with windows that are merged inside of it, and Qwen3.5.

The layer that merges windows is replicated on every rank.
"""

from typing import Any

from transformers import MiniCPMV4_6Config, MiniCPMV4_6VisionConfig
from transformers.models.minicpmv4_6 import modeling_minicpmv4_6 as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.video_llama_3 import PackedPatchesParallel


class MiniCPMEncoderParallel(PackedPatchesParallel):
    """Sharding plan of the encoder."""

    head_plan = {"post_layernorm": Norm(), "vit_merger": Replicated()}


class MiniCPMV4_6Parallel(LlavaParallel):
    """Sharding plan of the MiniCPM-V 4.6 family."""

    projectors = {"merger": Replicated()}
    classes = {"vision_tower": MiniCPMEncoderParallel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="the patches of all images are one row")


class MiniCPMV4_6Model(MiniCPMV4_6Parallel, hf.MiniCPMV4_6Model):
    pass


class MiniCPMV4_6ForConditionalGeneration(MiniCPMV4_6Parallel, hf.MiniCPMV4_6ForConditionalGeneration):
    head_plan = LM_HEAD
