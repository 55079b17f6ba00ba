"""Seed-OSS: Llama with biases of query, key and value."""

from transformers import SeedOssConfig
from transformers.models.seed_oss import modeling_seed_oss as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class SeedOssModel(LlamaParallel, hf.SeedOssModel):
    pass


class SeedOssForCausalLM(LlamaParallel, hf.SeedOssForCausalLM):
    head_plan = LM_HEAD


class SeedOssForSequenceClassification(LlamaParallel, hf.SeedOssForSequenceClassification):
    head_plan = SCORE


class SeedOssForTokenClassification(LlamaParallel, hf.SeedOssForTokenClassification):
    head_plan = SCORE


class SeedOssForQuestionAnswering(LlamaParallel, hf.SeedOssForQuestionAnswering):
    head_plan = QA_OUTPUTS
