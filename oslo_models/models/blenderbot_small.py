"""Blenderbot-small: BART."""

from transformers import BlenderbotSmallConfig
from transformers.models.blenderbot_small import modeling_blenderbot_small as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class BlenderbotSmallModel(BartParallel, hf.BlenderbotSmallModel):
    pass


class BlenderbotSmallForConditionalGeneration(BartParallel, hf.BlenderbotSmallForConditionalGeneration):
    head_plan = LM_HEAD


class BlenderbotSmallForCausalLM(BartParallel, hf.BlenderbotSmallForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)
