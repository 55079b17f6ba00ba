"""A.X-K2: DeepSeek-V3.2 with gated attention and gated norms; its indexer and the gates of norms are replicated."""

from typing import Any

from transformers import AXK2Config
from transformers.models.axk2 import modeling_axk2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Replicated
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.deepseek_v32 import DeepseekV32Parallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class AXK2Parallel(DeepseekV32Parallel):
    """Sharding plan of the A.X-K2 family."""

    norms = ()
    mlp = {
        **DeepseekV32Parallel.mlp,
        "input_layernorm": Replicated(),
        "post_attention_layernorm": Replicated(),
    }

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
        query_and_gate = ColumnParallel(EvenSplit(config.num_attention_heads, width))
        return {**super().attention(config, heads), "self_attn.q_gate_proj": query_and_gate}


class AXK2Model(AXK2Parallel, hf.AXK2Model):
    pass


class AXK2ForCausalLM(AXK2Parallel, hf.AXK2ForCausalLM):
    head_plan = LM_HEAD


class AXK2ForSequenceClassification(AXK2Parallel, hf.AXK2ForSequenceClassification):
    head_plan = SCORE


class AXK2ForTokenClassification(AXK2Parallel, hf.AXK2ForTokenClassification):
    head_plan = SCORE
