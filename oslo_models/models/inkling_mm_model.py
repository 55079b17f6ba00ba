"""Inkling: its text model reads patches of images and sounds. Every rank holds the linear layers that embed them."""

from transformers import InklingConfig
from transformers.models.inkling import modeling_inkling as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class InklingWithMediaParallel(LlavaParallel):
    """Sharding plan of the Inkling family with images and sounds."""

    towers = {}
    projectors = dict.fromkeys(("vision_tower", "audio_tower"), Replicated())


class InklingModel(InklingWithMediaParallel, hf.InklingModel):
    pass


class InklingForConditionalGeneration(InklingWithMediaParallel, hf.InklingForConditionalGeneration):
    head_plan = LM_HEAD
