"""LFM2 MoE: LFM2 with a mixture of experts in all except the first blocks."""

from transformers import Lfm2MoeConfig
from transformers.models.lfm2_moe import modeling_lfm2_moe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.lfm2 import Lfm2Parallel


class Lfm2MoeParallel(Lfm2Parallel):
    """Sharding plan of the LFM2 MoE family."""

    mlp = {**Lfm2Parallel.mlp, **mixture_of_experts("feed_forward")}
    optional = tuple(mlp)


class Lfm2MoeModel(Lfm2MoeParallel, hf.Lfm2MoeModel):
    pass


class Lfm2MoeForCausalLM(Lfm2MoeParallel, hf.Lfm2MoeForCausalLM):
    head_plan = LM_HEAD
