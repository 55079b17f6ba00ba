"""Seed-OSS: Llama with biases of query, key and value."""

from transformers import SeedOssConfig
from transformers.models.seed_oss import modeling_seed_oss as hf
from transformers.models.seed_oss.modeling_seed_oss import SeedOssPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class SeedOssParallel(LlamaParallel):
    """Sharding plan of the Seed-OSS family."""


class SeedOssModel(SeedOssParallel, hf.SeedOssModel):
    pass


class SeedOssForCausalLM(SeedOssParallel, hf.SeedOssForCausalLM):
    head_plan = LM_HEAD


class SeedOssForSequenceClassification(SeedOssParallel, hf.SeedOssForSequenceClassification):
    head_plan = SCORE


class SeedOssForTokenClassification(SeedOssParallel, hf.SeedOssForTokenClassification):
    head_plan = SCORE


class SeedOssForQuestionAnswering(SeedOssParallel, hf.SeedOssForQuestionAnswering):
    head_plan = QA_OUTPUTS
