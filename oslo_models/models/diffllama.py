"""DiffLlama: Llama with differences between pairs of heads; each half of the heads has one head of a pair."""

from dataclasses import replace
from typing import Any

from transformers import DiffLlamaConfig
from transformers.models.diffllama import modeling_diffllama as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class DiffLlamaParallel(LlamaParallel):
    """Sharding plan of the DiffLlama family."""

    @classmethod
    def attention_groups(cls, config: Any) -> int:
        return 2

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        pairs = replace(heads, query_heads=heads.query_heads // 2, kv_heads=heads.kv_heads // 2)
        weights = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        return {
            "self_attn": LocalAttributes({"num_key_value_groups": pairs.local_ratio}, shared=weights),
            **{f"self_attn.{name}": Replicated() for name in weights},
            "self_attn.q_proj": ColumnParallel(pairs.query, pairs.query),
            "self_attn.k_proj": ColumnParallel(pairs.key_value, pairs.key_value),
            "self_attn.v_proj": ColumnParallel(pairs.key_value, pairs.key_value),
            "self_attn.o_proj": RowParallel(replace(pairs, head_dim=2 * heads.head_dim).query),
        }


class DiffLlamaModel(DiffLlamaParallel, hf.DiffLlamaModel):
    pass


class DiffLlamaForCausalLM(DiffLlamaParallel, hf.DiffLlamaForCausalLM):
    head_plan = LM_HEAD


class DiffLlamaForSequenceClassification(DiffLlamaParallel, hf.DiffLlamaForSequenceClassification):
    head_plan = SCORE


class DiffLlamaForQuestionAnswering(DiffLlamaParallel, hf.DiffLlamaForQuestionAnswering):
    head_plan = QA_OUTPUTS


class DiffLlamaForTokenClassification(DiffLlamaParallel, hf.DiffLlamaForTokenClassification):
    head_plan = SCORE
