"""MiniMax-M2: OLMoE with partial rotary positions and a router that is balanced by biases."""

from transformers import MiniMaxM2Config
from transformers.models.minimax_m2 import modeling_minimax_m2 as hf
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2PreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.olmoe import OlmoeParallel


class MiniMaxM2Parallel(OlmoeParallel):
    """Sharding plan of the MiniMax-M2 family."""


class MiniMaxM2Model(MiniMaxM2Parallel, hf.MiniMaxM2Model):
    pass


class MiniMaxM2ForCausalLM(MiniMaxM2Parallel, hf.MiniMaxM2ForCausalLM):
    head_plan = LM_HEAD
