"""Mellum 2: Qwen3 MoE with sliding windows in some blocks."""

from transformers import MellumConfig
from transformers.models.mellum import modeling_mellum as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_moe import Qwen3MoeParallel


class MellumModel(Qwen3MoeParallel, hf.MellumModel):
    pass


class MellumForCausalLM(Qwen3MoeParallel, hf.MellumForCausalLM):
    head_plan = LM_HEAD
