"""OLMoE: OLMo with query and key norms over all heads and a mixture of experts in each block."""

from transformers import OlmoeConfig
from transformers.models.olmoe import modeling_olmoe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.olmo2 import Olmo2Parallel


class OlmoeParallel(Olmo2Parallel):
    """Sharding plan of the OLMoE family."""

    mlp = mixture_of_experts()
    norms = ("input_layernorm", "post_attention_layernorm")


class OlmoeModel(OlmoeParallel, hf.OlmoeModel):
    pass


class OlmoeForCausalLM(OlmoeParallel, hf.OlmoeForCausalLM):
    head_plan = LM_HEAD
