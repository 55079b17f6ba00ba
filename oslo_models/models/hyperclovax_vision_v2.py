"""HyperCLOVA X SEED Think: the encoder of Qwen2.5-VL, a linear projector and HyperCLOVA X."""

from transformers import HyperCLOVAXVisionV2Config
from transformers.models.hyperclovax_vision_v2 import modeling_hyperclovax_vision_v2 as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel


class HyperCLOVAXVisionV2Parallel(LlavaParallel):
    """Sharding plan of the HyperCLOVA X family with images."""

    towers = {"vision_model": "vision_config"}
    projectors = {"projector": Replicated()}
    classes = {"vision_model": Qwen2_5_VisionTransformerPretrainedModel}


class HyperCLOVAXVisionV2Model(HyperCLOVAXVisionV2Parallel, hf.HyperCLOVAXVisionV2Model):
    pass


class HyperCLOVAXVisionV2ForConditionalGeneration(
    HyperCLOVAXVisionV2Parallel, hf.HyperCLOVAXVisionV2ForConditionalGeneration
):
    head_plan = LM_HEAD
