"""Pegasus: BART with pre-layer norms and sinusoidal positions."""

from transformers import PegasusConfig
from transformers.models.pegasus import modeling_pegasus as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class PegasusParallel(BartParallel):
    """Sharding plan of the Pegasus family."""

    embedding_norms = ()
    final_norms = ("layer_norm",)
    embedding_changes = {"dropout": 0.0, "embed_scale": 1.0}


class PegasusModel(PegasusParallel, hf.PegasusModel):
    pass


class PegasusForConditionalGeneration(PegasusParallel, hf.PegasusForConditionalGeneration):
    head_plan = LM_HEAD


class PegasusForCausalLM(PegasusParallel, hf.PegasusForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)
