"""Mistral 4: DeepSeek-V3 with queries that grow with their positions, as in Llama 4."""

from transformers import Mistral4Config
from transformers.models.mistral4 import modeling_mistral4 as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.deepseek_v2 import DeepseekV2Parallel


class Mistral4Model(DeepseekV2Parallel, hf.Mistral4Model):
    pass


class Mistral4ForCausalLM(DeepseekV2Parallel, hf.Mistral4ForCausalLM):
    head_plan = LM_HEAD


class Mistral4ForSequenceClassification(DeepseekV2Parallel, hf.Mistral4ForSequenceClassification):
    head_plan = SCORE


class Mistral4ForTokenClassification(DeepseekV2Parallel, hf.Mistral4ForTokenClassification):
    head_plan = SCORE
