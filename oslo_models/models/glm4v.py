"""GLM-4V: an encoder of image patches with interpolated positions, and a decoder like GLM-4."""

from transformers import Glm4vConfig, Glm4vTextConfig, Glm4vVisionConfig
from transformers.models.glm4v import modeling_glm4v as hf

from oslo_models.layers.entries import Norm, Replicated
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.glm4 import Glm4Parallel
from oslo_models.models.qwen2_vl import QwenEncoderParallel, QwenWithImagesParallel


class Glm4vEncoderParallel(QwenEncoderParallel):
    """Sharding plan of the encoders of image patches in GLM's models."""

    mlp = gated_mlp("mlp")
    positions = {"embeddings": Replicated(), "post_conv_layernorm": Norm()}
    mergers = {"merger": Replicated(), "downsample": Replicated(), "post_layernorm": Norm()}


class Glm4vVisionModel(Glm4vEncoderParallel, hf.Glm4vVisionModel):
    pass


class Glm4vTextModel(Glm4Parallel, hf.Glm4vTextModel):
    pass


class Glm4vModel(QwenWithImagesParallel, hf.Glm4vModel):
    pass


class Glm4vForConditionalGeneration(QwenWithImagesParallel, hf.Glm4vForConditionalGeneration):
    head_plan = LM_HEAD
