"""StableLM: Llama with layer norms and optionally parallel residuals, with norms for each head."""

from dataclasses import replace
from typing import Any

from transformers import StableLmConfig
from transformers.models.stablelm import modeling_stablelm as hf
from transformers.models.stablelm.modeling_stablelm import StableLmPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries, HeadNorms, Plan


class StableLmParallel(LlamaParallel):
    """Sharding plan of the StableLM family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        norms = {"self_attn.q_layernorm": HeadNorms(heads.query), "self_attn.k_layernorm": HeadNorms(heads.key_value)}
        return {**super().attention(config, heads), **(norms if config.qk_layernorm else {})}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), optional=("post_attention_layernorm",))


class StableLmModel(StableLmParallel, hf.StableLmModel):
    pass


class StableLmForCausalLM(StableLmParallel, hf.StableLmForCausalLM):
    head_plan = LM_HEAD


class StableLmForSequenceClassification(StableLmParallel, hf.StableLmForSequenceClassification):
    head_plan = SCORE


class StableLmForTokenClassification(StableLmParallel, hf.StableLmForTokenClassification):
    head_plan = SCORE
