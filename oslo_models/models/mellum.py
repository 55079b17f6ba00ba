"""Mellum 2: Qwen3 MoE with sliding windows in some blocks."""

from transformers import MellumConfig
from transformers.models.mellum import modeling_mellum as hf
from transformers.models.mellum.modeling_mellum import MellumPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_moe import Qwen3MoeParallel


class MellumParallel(Qwen3MoeParallel):
    """Sharding plan of the Mellum 2 family."""


class MellumModel(MellumParallel, hf.MellumModel):
    pass


class MellumForCausalLM(MellumParallel, hf.MellumForCausalLM):
    head_plan = LM_HEAD
