"""Command A Vision: the tower of SigLIP, a projector and Cohere2."""

from transformers import Cohere2VisionConfig
from transformers.models.cohere2_vision import modeling_cohere2_vision as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class Cohere2VisionModel(LlavaParallel, hf.Cohere2VisionModel):
    pass


class Cohere2VisionForConditionalGeneration(LlavaParallel, hf.Cohere2VisionForConditionalGeneration):
    head_plan = LM_HEAD
