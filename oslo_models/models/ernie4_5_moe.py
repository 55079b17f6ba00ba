"""ERNIE 4.5 MoE: Llama with shared and routed experts in some blocks."""

from transformers import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class Ernie4_5_MoeParallel(LlamaParallel):
    """Sharding plan of the ERNIE 4.5 MoE family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = tuple(mlp)


class Ernie4_5_MoeModel(Ernie4_5_MoeParallel, hf.Ernie4_5_MoeModel):
    pass


class Ernie4_5_MoeForCausalLM(Ernie4_5_MoeParallel, hf.Ernie4_5_MoeForCausalLM):
    head_plan = LM_HEAD
