"""MiniMax-M2: OLMoE with partial rotary positions and a router that is balanced by biases."""

from transformers import MiniMaxM2Config
from transformers.models.minimax_m2 import modeling_minimax_m2 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.olmoe import OlmoeParallel


class MiniMaxM2Model(OlmoeParallel, hf.MiniMaxM2Model):
    pass


class MiniMaxM2ForCausalLM(OlmoeParallel, hf.MiniMaxM2ForCausalLM):
    head_plan = LM_HEAD
