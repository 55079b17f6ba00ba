"""Granite MoE: Granite with a mixture of experts in each block."""

from transformers import GraniteMoeConfig
from transformers.models.granitemoe import modeling_granitemoe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.granite import GraniteParallel


class GraniteMoeParallel(GraniteParallel):
    """Sharding plan of the Granite MoE family."""

    mlp = mixture_of_experts("block_sparse_moe", "router")


class GraniteMoeModel(GraniteMoeParallel, hf.GraniteMoeModel):
    pass


class GraniteMoeForCausalLM(GraniteMoeParallel, hf.GraniteMoeForCausalLM):
    head_plan = LM_HEAD
