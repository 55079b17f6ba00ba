"""OWLv2: OWL-ViT with a further head that scores whether a patch shows an object."""

from transformers import Owlv2Config, Owlv2TextConfig, Owlv2VisionConfig
from transformers.models.owlv2 import modeling_owlv2 as hf

from oslo_models.layers.entries import Replicated
from oslo_models.models.owlvit import HEADS, OwlViTParallel, OwlViTTextParallel, OwlViTVisionParallel


class Owlv2Model(OwlViTParallel, hf.Owlv2Model):
    loss_is_mean = False


class Owlv2TextModel(OwlViTTextParallel, hf.Owlv2TextModel):
    pass


class Owlv2VisionModel(OwlViTVisionParallel, hf.Owlv2VisionModel):
    pass


class Owlv2ForObjectDetection(OwlViTParallel, hf.Owlv2ForObjectDetection):
    head_plan = {**HEADS, "objectness_head": Replicated()}
