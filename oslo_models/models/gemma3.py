"""Gemma 3 with images: the tower of SigLIP, a projector and the text model."""

from transformers import Gemma3Config
from transformers.models.gemma3 import modeling_gemma3 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class Gemma3Model(LlavaParallel, hf.Gemma3Model):
    pass


class Gemma3ForConditionalGeneration(LlavaParallel, hf.Gemma3ForConditionalGeneration):
    head_plan = LM_HEAD
