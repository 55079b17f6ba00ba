"""Granite MoE SWA: Granite SWA with a mixture of experts in each block, and optionally a shared one."""

from transformers import GraniteMoeSWAConfig
from transformers.models.granitemoe_swa import modeling_granitemoe_swa as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.granite_swa import GraniteSWAParallel
from oslo_models.models.granitemoeshared import GraniteMoeSharedParallel


class GraniteMoeSWAParallel(GraniteSWAParallel):
    """Sharding plan of the Granite MoE SWA family."""

    mlp = GraniteMoeSharedParallel.mlp
    optional = GraniteMoeSharedParallel.optional


class GraniteMoeSWAModel(GraniteMoeSWAParallel, hf.GraniteMoeSWAModel):
    pass


class GraniteMoeSWAForCausalLM(GraniteMoeSWAParallel, hf.GraniteMoeSWAForCausalLM):
    head_plan = LM_HEAD
