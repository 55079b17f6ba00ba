"""DeepSeek-VL: the tower of SigLIP, an aligner and Llama."""

from transformers import DeepseekVLConfig
from transformers.models.deepseek_vl import modeling_deepseek_vl as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class DeepseekVLParallel(LlavaParallel):
    """Sharding plan of the DeepSeek-VL family."""

    towers = {"vision_model": "vision_config"}
    projectors = {"aligner": Replicated()}


class DeepseekVLModel(DeepseekVLParallel, hf.DeepseekVLModel):
    pass


class DeepseekVLForConditionalGeneration(DeepseekVLParallel, hf.DeepseekVLForConditionalGeneration):
    head_plan = LM_HEAD
