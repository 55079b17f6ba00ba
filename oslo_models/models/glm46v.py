"""GLM-4.6V: the encoder and the decoder of GLM-4V, or of another model."""

from transformers import Glm46VConfig
from transformers.models.glm46v import modeling_glm46v as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen2_vl import QwenWithImagesParallel


class Glm46VModel(QwenWithImagesParallel, hf.Glm46VModel):
    pass


class Glm46VForConditionalGeneration(QwenWithImagesParallel, hf.Glm46VForConditionalGeneration):
    head_plan = LM_HEAD
