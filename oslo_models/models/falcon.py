"""Falcon: multi-query, grouped-query or multi-head attention, with rotary positions or ALiBi."""

from typing import Any

from transformers import FalconConfig
from transformers.models.falcon import modeling_falcon as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.sharding.layout import GroupedHeads


class FalconParallel(ParallelModel):
    """Sharding plan of the Falcon family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        count, grouped = config.num_attention_heads, config.new_decoder_architecture
        one_each = count if not config.multi_query else 1
        heads = GroupedHeads(count, config.num_kv_heads if grouped else one_each, config.hidden_size // count)
        if grouped or not config.multi_query:
            qkv = ColumnParallel(*heads.interleaved)
        else:
            qkv = ColumnParallel(heads.query, heads.key_value, heads.key_value)
        norms = ("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp")
        block = {
            **{name: Norm() for name in norms},
            "self_attention": LocalAttributes(
                {"num_heads": heads.query.local_count, "num_kv_heads": heads.key_value.local_count},
                per_head={"alibi": heads.query, "attention_mask": heads.query},
            ),
            "self_attention.query_key_value": qkv,
            "self_attention.dense": RowParallel(heads.query),
            "mlp.dense_h_to_4h": ColumnParallel(),
            "mlp.dense_4h_to_h": RowParallel(),
        }
        return Plan(
            embed={"word_embeddings": VocabParallel()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            optional=norms,
        )


class FalconModel(FalconParallel, hf.FalconModel):
    pass


class FalconForCausalLM(FalconParallel, hf.FalconForCausalLM):
    head_plan = LM_HEAD


class FalconForSequenceClassification(FalconParallel, hf.FalconForSequenceClassification):
    head_plan = SCORE


class FalconForTokenClassification(FalconParallel, hf.FalconForTokenClassification):
    head_plan = CLASSIFIER


class FalconForQuestionAnswering(FalconParallel, hf.FalconForQuestionAnswering):
    head_plan = QA_OUTPUTS
