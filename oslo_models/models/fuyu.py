"""Fuyu: Persimmon with linear projections of image patches among its tokens."""

from transformers import FuyuConfig
from transformers.models.fuyu import modeling_fuyu as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class FuyuParallel(LlavaParallel):
    """Sharding plan of the Fuyu family."""

    towers = {}
    projectors = {"vision_embed_tokens": Replicated()}


class FuyuModel(FuyuParallel, hf.FuyuModel):
    pass


class FuyuForCausalLM(FuyuParallel, hf.FuyuForCausalLM):
    head_plan = LM_HEAD
