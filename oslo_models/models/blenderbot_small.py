"""Blenderbot-small: BART."""

from transformers import BlenderbotSmallConfig
from transformers.models.blenderbot_small import modeling_blenderbot_small as hf
from transformers.models.blenderbot_small.modeling_blenderbot_small import BlenderbotSmallPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class BlenderbotSmallParallel(BartParallel):
    """Sharding plan of the Blenderbot-small family."""


class BlenderbotSmallModel(BlenderbotSmallParallel, hf.BlenderbotSmallModel):
    pass


class BlenderbotSmallForConditionalGeneration(BlenderbotSmallParallel, hf.BlenderbotSmallForConditionalGeneration):
    head_plan = LM_HEAD


class BlenderbotSmallForCausalLM(BlenderbotSmallParallel, hf.BlenderbotSmallForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)
