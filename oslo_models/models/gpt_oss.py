"""gpt-oss: Llama with biases, attention sinks, and experts with alternating gate and up projections."""

from typing import Any

from transformers import GptOssConfig
from transformers.models.gpt_oss import modeling_gpt_oss as hf

from oslo_models.layers.entries import Entries, Experts, Replicated
from oslo_models.modeling.blocks import attention_sinks
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class GptOssParallel(LlamaParallel):
    """Sharding plan of the gpt-oss family."""

    mlp = {"mlp.router": Replicated(), "mlp.experts": Experts(transposed=True, interleaved=True)}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.sinks": attention_sinks(heads)}


class GptOssModel(GptOssParallel, hf.GptOssModel):
    pass


class GptOssForCausalLM(GptOssParallel, hf.GptOssForCausalLM):
    head_plan = LM_HEAD


class GptOssForSequenceClassification(GptOssParallel, hf.GptOssForSequenceClassification):
    head_plan = SCORE


class GptOssForTokenClassification(GptOssParallel, hf.GptOssForTokenClassification):
    head_plan = SCORE
