"""Blenderbot: BART with norms before attention and MLP."""

from transformers import BlenderbotConfig
from transformers.models.blenderbot import modeling_blenderbot as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class BlenderbotParallel(BartParallel):
    """How every model of the Blenderbot family divides."""

    before = ()
    after = ("layer_norm",)


class BlenderbotModel(BlenderbotParallel, hf.BlenderbotModel):
    pass


class BlenderbotForConditionalGeneration(BlenderbotParallel, hf.BlenderbotForConditionalGeneration):
    head_plan = LM_HEAD


class BlenderbotForCausalLM(BlenderbotParallel, hf.BlenderbotForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)
