"""HunYuan dense: Llama with norms of each query and key head, after their rotation."""

from transformers.models.hunyuan_v1_dense import modeling_hunyuan_v1_dense as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class HunYuanDenseV1Parallel(LlamaParallel):
    """How every model of the HunYuan dense family divides."""

    head_norms = ("self_attn.query_layernorm", "self_attn.key_layernorm")


globals().update(family(HunYuanDenseV1Parallel, hf, DECODER))
