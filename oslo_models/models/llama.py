"""Llama: grouped-query attention, gated MLP, RMS norms, rotary positions."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as hf
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    HeadNorm,
    LocalAttributes,
    LocalValue,
    Norm,
    Plan,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.sharding.layout import GroupedHeads


class LlamaParallel(ParallelModel):
    """Sharding plan of the Llama family, and base class for families with other names or norms.

    Attributes:
        norms: the norms of a block.
        head_norms: norms of each query or key head.
        mlp: the MLP of a block.
        optional: names of entries that only some blocks or configurations have.
    """

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    head_norms: ClassVar[tuple[str, ...]] = ()
    mlp: ClassVar[Entries] = {
        "mlp.gate_proj": ColumnParallel(),
        "mlp.up_proj": ColumnParallel(),
        "mlp.down_proj": RowParallel(),
    }
    optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def heads(cls, config: Any) -> GroupedHeads:
        """Return the attention heads."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return GroupedHeads(config.num_attention_heads, config.num_key_value_heads, head_dim)

    @staticmethod
    def local_attributes(heads: GroupedHeads) -> dict[str, LocalValue]:
        """Return the head counts of an attention layer, as attributes with local values."""
        return {
            "num_heads": heads.query.local_count,
            "num_key_value_heads": heads.key_value.local_count,
            "num_key_value_groups": heads.local_ratio,
        }

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        """Return the plan entries of an attention layer."""
        return {
            "self_attn": LocalAttributes(cls.local_attributes(heads)),
            "self_attn.q_proj": ColumnParallel(heads.query),
            "self_attn.k_proj": ColumnParallel(heads.key_value),
            "self_attn.v_proj": ColumnParallel(heads.key_value),
            "self_attn.o_proj": RowParallel(heads.query),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = cls.heads(config)
        norms = {name: Norm() for name in cls.norms} | {name: HeadNorm() for name in cls.head_norms}
        return Plan(
            embed={"embed_tokens": VocabParallel()},
            blocks={"layers": {**cls.attention(config, heads), **cls.mlp, **norms}},
            head={"norm": Norm()},
            optional=cls.optional,
        )


class LlamaModel(LlamaParallel, hf.LlamaModel):
    pass


class LlamaForCausalLM(LlamaParallel, hf.LlamaForCausalLM):
    head_plan = LM_HEAD


class LlamaForSequenceClassification(LlamaParallel, hf.LlamaForSequenceClassification):
    head_plan = SCORE


class LlamaForTokenClassification(LlamaParallel, hf.LlamaForTokenClassification):
    head_plan = SCORE


class LlamaForQuestionAnswering(LlamaParallel, hf.LlamaForQuestionAnswering):
    head_plan = QA_OUTPUTS
