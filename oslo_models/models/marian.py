"""Marian: BART with sinusoidal positions."""

from transformers import MarianConfig
from transformers.models.marian import modeling_marian as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class MarianParallel(BartParallel):
    """Sharding plan of the Marian family."""

    embedding_norms = ()
    embedding_changes = {"dropout": 0.0, "embed_scale": 1.0}


class MarianModel(MarianParallel, hf.MarianModel):
    pass


class MarianMTModel(MarianParallel, hf.MarianMTModel):
    head_plan = LM_HEAD


class MarianForCausalLM(MarianParallel, hf.MarianForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)
