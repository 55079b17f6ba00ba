"""DeepSeek-VL with two encoders: SigLIP's for small copies of images, and SAM's for large ones."""

from typing import Any

from transformers import DeepseekVLHybridConfig
from transformers.models.deepseek_vl_hybrid import modeling_deepseek_vl_hybrid as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.got_ocr2 import WindowsParallel
from oslo_models.models.llava import LlavaParallel


class SamParallel(WindowsParallel):
    """Sharding plan of SAM's encoder."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).under("vision_encoder.")


class DeepseekVLHybridParallel(LlavaParallel):
    """Sharding plan of the DeepSeek-VL family with two encoders."""

    towers = {"vision_model": "vision_config", "high_res_vision_model": "high_res_vision_config"}
    projectors = dict.fromkeys(
        ("aligner", "high_res_vision_neck", "high_res_vision_proj", "high_res_vision_alpha"), Replicated()
    )
    classes = {"high_res_vision_model": SamParallel}


class DeepseekVLHybridModel(DeepseekVLHybridParallel, hf.DeepseekVLHybridModel):
    pass


class DeepseekVLHybridForConditionalGeneration(DeepseekVLHybridParallel, hf.DeepseekVLHybridForConditionalGeneration):
    head_plan = LM_HEAD
