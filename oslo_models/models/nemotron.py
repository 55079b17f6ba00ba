"""Nemotron: Llama with an MLP that has no gate."""

from transformers.models.nemotron import modeling_nemotron as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Row


class NemotronParallel(LlamaParallel):
    """How every model of the Nemotron family divides."""

    mlp = {"mlp.up_proj": Column(), "mlp.down_proj": Row()}


globals().update(family(NemotronParallel, hf, DECODER))
