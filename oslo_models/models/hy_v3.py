"""Hunyuan 3: Qwen3 with shared and routed experts, and a router that is balanced by biases."""

from transformers import HYV3Config
from transformers.models.hy_v3 import modeling_hy_v3 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.dots1 import Dots1Parallel


class HYV3Model(Dots1Parallel, hf.HYV3Model):
    pass


class HYV3ForCausalLM(Dots1Parallel, hf.HYV3ForCausalLM):
    head_plan = LM_HEAD
