"""MiniMax-01: Mixtral with lightning attention over heads in some blocks, and decay factors in buffers.

Each rank has the decay factors of its heads. The norm after lightning attention is over all heads.
"""

from dataclasses import replace
from typing import Any

from transformers import MiniMaxConfig
from transformers.models.minimax import modeling_minimax as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Plan, RowParallel, WidthNorm
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.mixtral import MixtralParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class MiniMaxParallel(MixtralParallel):
    """Sharding plan of the MiniMax-01 family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        each = EvenSplit(heads.query_heads)
        count = {"num_attention_heads": each.local_count}
        return {
            **super().attention(config, heads),
            "self_attn": LocalAttributes({**cls.local_attributes(heads), **count}),
            **cls.lightning_attention(each, EvenSplit(each.count, heads.head_dim)),
        }

    @classmethod
    def lightning_attention(cls, each: EvenSplit, heads: EvenSplit) -> Entries:
        """Return the plan entries of lightning attention.

        Args:
            each: the heads, with one element per head.
            heads: the heads, with their width.
        """
        decays = ("slope_rate", "query_decay", "key_decay")
        return {
            "self_attn.qkv_proj": ColumnParallel(EvenSplit(heads.count, 3 * heads.width)),
            "self_attn.output_gate": ColumnParallel(heads),
            "self_attn.norm": WidthNorm(heads),
            "self_attn.out_proj": RowParallel(heads),
            **{f"self_attn.{name}": ColumnParallel(each) for name in decays},
            "self_attn.diagonal_decay": ColumnParallel(each, dim=1),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(
            super().plan(config),
            optional=tuple(cls.attention(config, cls.heads(config))),
        ).with_rules(keeps_layer_numbers=True)


class MiniMaxModel(MiniMaxParallel, hf.MiniMaxModel):
    pass


class MiniMaxForCausalLM(MiniMaxParallel, hf.MiniMaxForCausalLM):
    head_plan = LM_HEAD


class MiniMaxForSequenceClassification(MiniMaxParallel, hf.MiniMaxForSequenceClassification):
    head_plan = SCORE


class MiniMaxForTokenClassification(MiniMaxParallel, hf.MiniMaxForTokenClassification):
    head_plan = SCORE


class MiniMaxForQuestionAnswering(MiniMaxParallel, hf.MiniMaxForQuestionAnswering):
    head_plan = QA_OUTPUTS
