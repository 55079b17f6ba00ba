"""GLM-4.7-Flash: DeepSeek-V3 with GLM's configuration."""

from transformers import Glm4MoeLiteConfig
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel


class Glm4MoeLiteModel(DeepseekV2Parallel, hf.Glm4MoeLiteModel):
    pass


class Glm4MoeLiteForCausalLM(DeepseekV2Parallel, hf.Glm4MoeLiteForCausalLM):
    head_plan = LM_HEAD
