"""Blenderbot: BART with pre-layer norms."""

from transformers import BlenderbotConfig
from transformers.models.blenderbot import modeling_blenderbot as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class BlenderbotParallel(BartParallel):
    """Sharding plan of the Blenderbot family."""

    embedding_norms = ()
    final_norms = ("layer_norm",)


class BlenderbotModel(BlenderbotParallel, hf.BlenderbotModel):
    pass


class BlenderbotForConditionalGeneration(BlenderbotParallel, hf.BlenderbotForConditionalGeneration):
    head_plan = LM_HEAD


class BlenderbotForCausalLM(BlenderbotParallel, hf.BlenderbotForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)
