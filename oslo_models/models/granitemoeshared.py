"""Granite MoE with shared experts: Granite with a mixture of experts in each block, and optionally a shared one."""

from transformers import GraniteMoeSharedConfig
from transformers.models.granitemoeshared import modeling_granitemoeshared as hf

from oslo_models.layers.entries import ColumnParallel, RowParallel
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.granite import GraniteParallel


class GraniteMoeSharedParallel(GraniteParallel):
    """Sharding plan of the family of Granite MoE with shared experts."""

    shared = {"shared_mlp.input_linear": ColumnParallel(parts=2), "shared_mlp.output_linear": RowParallel()}
    mlp = {**mixture_of_experts("block_sparse_moe", "router"), **shared}
    optional = tuple(shared)


class GraniteMoeSharedModel(GraniteMoeSharedParallel, hf.GraniteMoeSharedModel):
    pass


class GraniteMoeSharedForCausalLM(GraniteMoeSharedParallel, hf.GraniteMoeSharedForCausalLM):
    head_plan = LM_HEAD
