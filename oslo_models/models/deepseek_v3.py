"""DeepSeek-V3 and R1: DeepSeek-V2 with a router that is balanced by biases."""

from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel


class DeepseekV3Model(DeepseekV2Parallel, hf.DeepseekV3Model):
    pass


class DeepseekV3ForCausalLM(DeepseekV2Parallel, hf.DeepseekV3ForCausalLM):
    head_plan = LM_HEAD


class DeepseekV3ForSequenceClassification(DeepseekV2Parallel, hf.DeepseekV3ForSequenceClassification):
    head_plan = SCORE


class DeepseekV3ForTokenClassification(DeepseekV2Parallel, hf.DeepseekV3ForTokenClassification):
    head_plan = SCORE
