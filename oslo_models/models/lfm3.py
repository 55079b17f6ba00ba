"""LFM3: LFM2 with four norms per block, gated attention and sliding windows."""

from dataclasses import replace
from typing import Any

from transformers import Lfm3Config
from transformers.models.lfm3 import modeling_lfm3 as hf

from oslo_models.layers.entries import ColumnParallel, Entries
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.lfm2 import Lfm2Parallel
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class Lfm3Parallel(Lfm2Parallel):
    """Sharding plan of the LFM3 family."""

    norms = (*Lfm2Parallel.norms, "post_operator_norm", "post_ffn_norm")
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        gates = ColumnParallel(replace(heads, head_dim=1).query)
        return {**LlamaParallel.attention(config, heads), "self_attn.g_proj": gates, **cls.convolution}


class Lfm3Model(Lfm3Parallel, hf.Lfm3Model):
    pass


class Lfm3ForCausalLM(Lfm3Parallel, hf.Lfm3ForCausalLM):
    head_plan = LM_HEAD
