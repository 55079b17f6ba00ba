"""Mistral 3 with images: the tower of Pixtral, a projector and Mistral."""

from transformers import Mistral3Config
from transformers.models.mistral3 import modeling_mistral3 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class Mistral3Model(LlavaParallel, hf.Mistral3Model):
    pass


class Mistral3ForConditionalGeneration(LlavaParallel, hf.Mistral3ForConditionalGeneration):
    head_plan = LM_HEAD
