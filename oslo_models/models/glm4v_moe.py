"""GLM-4.5V: GLM-4V with the mixture of experts of GLM-4.5 in the decoder."""

from transformers import Glm4vMoeConfig, Glm4vMoeTextConfig, Glm4vMoeVisionConfig
from transformers.models.glm4v_moe import modeling_glm4v_moe as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.glm4_moe import Glm4MoeParallel
from oslo_models.models.glm4v import Glm4vEncoderParallel
from oslo_models.models.qwen2_vl import QwenWithImagesParallel


class Glm4vMoeVisionModel(Glm4vEncoderParallel, hf.Glm4vMoeVisionModel):
    pass


class Glm4vMoeTextModel(Glm4MoeParallel, hf.Glm4vMoeTextModel):
    pass


class Glm4vMoeModel(QwenWithImagesParallel, hf.Glm4vMoeModel):
    pass


class Glm4vMoeForConditionalGeneration(QwenWithImagesParallel, hf.Glm4vMoeForConditionalGeneration):
    head_plan = LM_HEAD
