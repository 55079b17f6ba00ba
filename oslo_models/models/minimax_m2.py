"""MiniMax-M2: Llama with query and key norms over all heads and a mixture of experts in each block."""

from transformers import MiniMaxM2Config
from transformers.models.minimax_m2 import modeling_minimax_m2 as hf
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2PreTrainedModel

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.olmo2 import Olmo2Parallel


class MiniMaxM2Parallel(Olmo2Parallel):
    """Sharding plan of the MiniMax-M2 family."""

    mlp = mixture_of_experts()
    norms = ("input_layernorm", "post_attention_layernorm")


class MiniMaxM2Model(MiniMaxM2Parallel, hf.MiniMaxM2Model):
    pass


class MiniMaxM2ForCausalLM(MiniMaxM2Parallel, hf.MiniMaxM2ForCausalLM):
    head_plan = LM_HEAD
