"""Falcon: one key-value head for all queries, for each group, or for each; rotary positions or ALiBi."""

from typing import Any

from transformers.models.falcon import modeling_falcon as hf

from oslo_models.layout import GroupedHeads
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import DECODER, family
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab

HEADS = {**DECODER, "ForTokenClassification": {"classifier": Replicated()}}


class FalconParallel(ParallelModel):
    """How every model of the Falcon family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        count, grouped = config.num_attention_heads, config.new_decoder_architecture
        one_each = count if not config.multi_query else 1
        heads = GroupedHeads(count, config.num_kv_heads if grouped else one_each, config.hidden_size // count)
        if grouped or not config.multi_query:
            qkv = Column(*heads.interleaved)
        else:
            qkv = Column(heads.query, heads.key_value, heads.key_value)
        norms = ("input_layernorm", "post_attention_layernorm", "ln_attn", "ln_mlp")
        block = {
            **{name: Norm() for name in norms},
            "self_attention.query_key_value": qkv,
            "self_attention.dense": Row(heads.query),
            "mlp.dense_h_to_4h": Column(),
            "mlp.dense_4h_to_h": Row(),
        }
        return Plan(
            embed={"word_embeddings": Vocab()},
            blocks={"h": block},
            head={"ln_f": Norm()},
            local={
                "self_attention.num_heads": heads.query.local_count,
                "self_attention.num_kv_heads": heads.key_value.local_count,
            },
            per_head={f"self_attention.{name}": heads.query for name in ("alibi", "attention_mask")},
            optional=norms,
        )


globals().update(family(FalconParallel, hf, HEADS))
