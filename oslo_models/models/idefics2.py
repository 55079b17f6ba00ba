"""Idefics2: an encoder of image patches, a perceiver that pools them, and a decoder."""

from transformers import Idefics2Config
from transformers.models.idefics2 import modeling_idefics2 as hf

from oslo_models.layers.entries import Norm
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.idefics3 import Idefics3Parallel
from oslo_models.models.siglip import SiglipParallel


class Idefics2VisionParallel(SiglipParallel):
    """Sharding plan of the encoder."""

    head_plan = {"post_layernorm": Norm()}
    encoders = {VISION: ""}


class Idefics2Parallel(Idefics3Parallel):
    """Sharding plan of the Idefics2 family."""

    classes = {"vision_model": Idefics2VisionParallel}


class Idefics2Model(Idefics2Parallel, hf.Idefics2Model):
    pass


class Idefics2ForConditionalGeneration(Idefics2Parallel, hf.Idefics2ForConditionalGeneration):
    head_plan = LM_HEAD
