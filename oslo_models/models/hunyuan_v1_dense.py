"""HunYuan dense: Llama with query and key norms for each head, after the rotation."""

from transformers import HunYuanDenseV1Config
from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class HunYuanDenseV1Parallel(LlamaParallel):
    """Sharding plan of the HunYuan dense family."""

    head_norms = ("self_attn.query_layernorm", "self_attn.key_layernorm")


class HunYuanDenseV1Model(HunYuanDenseV1Parallel, hf.HunYuanDenseV1Model):
    pass


class HunYuanDenseV1ForCausalLM(HunYuanDenseV1Parallel, hf.HunYuanDenseV1ForCausalLM):
    head_plan = LM_HEAD


class HunYuanDenseV1ForSequenceClassification(HunYuanDenseV1Parallel, hf.HunYuanDenseV1ForSequenceClassification):
    head_plan = SCORE
