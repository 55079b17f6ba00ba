"""LLaVA-NeXT-Video: LLaVA-NeXT that also reads videos and pools their frames."""

from transformers import LlavaNextVideoConfig
from transformers.models.llava_next_video import modeling_llava_next_video as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava_next import TiledParallel


class LlavaNextVideoParallel(TiledParallel):
    """Sharding plan of the LLaVA-NeXT-Video family."""

    projectors = {**TiledParallel.projectors, "vision_resampler": Replicated()}


class LlavaNextVideoModel(LlavaNextVideoParallel, hf.LlavaNextVideoModel):
    pass


class LlavaNextVideoForConditionalGeneration(LlavaNextVideoParallel, hf.LlavaNextVideoForConditionalGeneration):
    head_plan = LM_HEAD
