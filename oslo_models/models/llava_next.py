"""LLaVA-NeXT: LLaVA that divides images into tiles, with a learned token at the end of each line."""

from transformers import LlavaNextConfig
from transformers.models.llava_next import modeling_llava_next as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class TiledParallel(LlavaParallel):
    """Sharding plan of models that divide images into tiles."""

    projectors = {**LlavaParallel.projectors, "image_newline": Replicated()}


class LlavaNextModel(TiledParallel, hf.LlavaNextModel):
    pass


class LlavaNextForConditionalGeneration(TiledParallel, hf.LlavaNextForConditionalGeneration):
    head_plan = LM_HEAD
