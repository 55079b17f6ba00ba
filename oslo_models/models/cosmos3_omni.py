"""Cosmos 3 Omni: the encoder of Qwen3-VL and its decoder."""

from transformers import Cosmos3OmniConfig
from transformers.models.cosmos3_omni import modeling_cosmos3_omni as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_vl import Qwen3VLParallel


class Cosmos3OmniModel(Qwen3VLParallel, hf.Cosmos3OmniModel):
    pass


class Cosmos3OmniForConditionalGeneration(Qwen3VLParallel, hf.Cosmos3OmniForConditionalGeneration):
    head_plan = LM_HEAD
