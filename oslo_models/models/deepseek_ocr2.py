"""DeepSeek-OCR 2: SAM's encoder, Qwen2 over its patches and over queries, and Llama with a mixture of experts."""

from dataclasses import replace
from typing import Any

from transformers import DeepseekOcr2Config, DeepseekOcr2TextConfig, DeepseekOcr2VisionConfig
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.composite import plan_with_towers
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.got_ocr2 import WindowsParallel
from oslo_models.models.llama import LlamaParallel


class WindowsWithConvolutionsParallel(WindowsParallel):
    """Sharding plan of SAM's encoder, with two convolutions after it."""

    head_plan = {"proj": Replicated()}


class PatchesAndQueriesParallel(LlamaParallel):
    """Sharding plan of the encoder of patches and queries, without words."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), embed={})


class DeepseekOcr2TextModel(LlamaParallel, hf.DeepseekOcr2TextModel):
    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = tuple(mlp)


class DeepseekOcr2Parallel(ParallelModel):
    """Sharding plan of the DeepSeek-OCR 2 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        vision = config.vision_config
        towers = [
            ("vision_tower.sam_encoder", WindowsWithConvolutionsParallel, vision.sam_config),
            ("vision_tower.vision_encoder", PatchesAndQueriesParallel, vision.encoder_config),
        ]
        queries = (f"vision_tower.query_{size}_resolution" for size in (768, 1024))
        between = dict.fromkeys((*queries, "multi_modal_projector", "view_separator"), Replicated())
        decoder = ("language_model", DeepseekOcr2TextModel, config.text_config)
        return plan_with_towers(decoder, towers, between).with_rules(
            single_stage_reason="an image and its tiles are in different arguments"
        )


class DeepseekOcr2Model(DeepseekOcr2Parallel, hf.DeepseekOcr2Model):
    pass


class DeepseekOcr2ForConditionalGeneration(DeepseekOcr2Parallel, hf.DeepseekOcr2ForConditionalGeneration):
    head_plan = LM_HEAD
