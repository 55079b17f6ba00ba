"""Hunyuan V1 MoE: Llama with query and key norms, and shared and routed experts."""

from transformers import HunYuanMoEV1Config
from transformers.models.hunyuan_v1_moe import modeling_hunyuan_v1_moe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class HunYuanMoEV1Parallel(LlamaParallel):
    """Sharding plan of the Hunyuan V1 MoE family."""

    head_norms = ("self_attn.query_layernorm", "self_attn.key_layernorm")
    mlp = {**mixture_of_experts(shared="shared_mlp")}


class HunYuanMoEV1Model(HunYuanMoEV1Parallel, hf.HunYuanMoEV1Model):
    pass


class HunYuanMoEV1ForCausalLM(HunYuanMoEV1Parallel, hf.HunYuanMoEV1ForCausalLM):
    head_plan = LM_HEAD


class HunYuanMoEV1ForSequenceClassification(HunYuanMoEV1Parallel, hf.HunYuanMoEV1ForSequenceClassification):
    head_plan = SCORE
