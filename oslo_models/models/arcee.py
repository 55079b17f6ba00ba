"""Arcee: Llama with an MLP that has no gate."""

from transformers.models.arcee import modeling_arcee as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Row


class ArceeParallel(LlamaParallel):
    """How every model of the Arcee family divides."""

    mlp = {"mlp.up_proj": Column(), "mlp.down_proj": Row()}


globals().update(family(ArceeParallel, hf, DECODER))
