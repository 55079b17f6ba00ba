"""DeepSeek-V2: Llama with multi-head latent attention, and shared and routed experts after the first blocks."""

from typing import Any

from transformers import DeepseekV2Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as hf
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2PreTrainedModel

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads
from oslo_models.sharding.plan import (
    ColumnParallel,
    Entries,
    Latent,
    LocalModule,
    Norm,
    Replicated,
    RowParallel,
)


class DeepseekV2Parallel(LlamaParallel):
    """Sharding plan of the DeepSeek-V2 family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = (*mlp, "self_attn.q_proj", "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        count = config.num_attention_heads
        query = EvenSplit(count, config.qk_nope_head_dim + config.qk_rope_head_dim)
        return {
            "self_attn": LocalModule({"num_heads": query.local_count}),
            "self_attn.q_proj": ColumnParallel(query),
            "self_attn.q_a_proj": Replicated(),
            "self_attn.q_a_layernorm": Norm(),
            "self_attn.q_b_proj": ColumnParallel(query),
            "self_attn.kv_a_proj_with_mqa": Latent(config.qk_rope_head_dim),
            "self_attn.kv_a_layernorm": Norm(),
            "self_attn.kv_b_proj": ColumnParallel(EvenSplit(count, config.qk_nope_head_dim + config.v_head_dim)),
            "self_attn.o_proj": RowParallel(EvenSplit(count, config.v_head_dim)),
        }


class DeepseekV2Model(DeepseekV2Parallel, hf.DeepseekV2Model):
    pass


class DeepseekV2ForCausalLM(DeepseekV2Parallel, hf.DeepseekV2ForCausalLM):
    head_plan = LM_HEAD


class DeepseekV2ForSequenceClassification(DeepseekV2Parallel, hf.DeepseekV2ForSequenceClassification):
    head_plan = SCORE
