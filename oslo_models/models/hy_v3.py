"""Hunyuan 3: Qwen3 with shared and routed experts, and a router that is balanced by biases."""

from transformers import HYV3Config
from transformers.models.hy_v3 import modeling_hy_v3 as hf
from transformers.models.hy_v3.modeling_hy_v3 import HYV3PreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.dots1 import Dots1Parallel


class HYV3Parallel(Dots1Parallel):
    """Sharding plan of the Hunyuan 3 family."""


class HYV3Model(HYV3Parallel, hf.HYV3Model):
    pass


class HYV3ForCausalLM(HYV3Parallel, hf.HYV3ForCausalLM):
    head_plan = LM_HEAD
