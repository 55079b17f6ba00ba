"""Aria: the tower of Idefics3, a projector with queries, and a mixture of experts."""

from transformers import AriaConfig
from transformers.models.aria import modeling_aria as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class AriaModel(LlavaParallel, hf.AriaModel):
    pass


class AriaForConditionalGeneration(LlavaParallel, hf.AriaForConditionalGeneration):
    head_plan = LM_HEAD
