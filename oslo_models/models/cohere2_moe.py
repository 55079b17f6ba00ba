"""Cohere 2 MoE: Cohere 2 with routed and optionally shared experts in some blocks."""

from transformers import Cohere2MoeConfig
from transformers.models.cohere2_moe import modeling_cohere2_moe as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.cohere2 import Cohere2Parallel
from oslo_models.models.dots1 import Dots1Parallel


class Cohere2MoeParallel(Cohere2Parallel):
    """Sharding plan of the Cohere 2 MoE family."""

    mlp = Dots1Parallel.mlp
    optional = Dots1Parallel.optional


class Cohere2MoeModel(Cohere2MoeParallel, hf.Cohere2MoeModel):
    pass


class Cohere2MoeForCausalLM(Cohere2MoeParallel, hf.Cohere2MoeForCausalLM):
    head_plan = LM_HEAD
