"""Inkling 2 Loop: the encoder of Inkling 2, and the text model with blocks that run several times."""

from transformers import Inkling2LoopConfig
from transformers.models.inkling2_loop import modeling_inkling2_loop as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.inkling2 import Inkling2WithImagesParallel


class Inkling2LoopModel(Inkling2WithImagesParallel, hf.Inkling2LoopModel):
    pass


class Inkling2LoopForConditionalGeneration(Inkling2WithImagesParallel, hf.Inkling2LoopForConditionalGeneration):
    head_plan = LM_HEAD
