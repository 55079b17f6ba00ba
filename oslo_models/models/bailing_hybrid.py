"""Ling 2.6 (Bailing hybrid): Kimi Linear with rotary positions, and gates of full rank."""

from typing import Any

from transformers import BailingHybridConfig
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as hf

from oslo_models.layers.entries import ColumnParallel, Entries
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.kimi_linear import KimiLinearParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class BailingHybridParallel(KimiLinearParallel):
    """Sharding plan of the Bailing hybrid family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        gates = ColumnParallel(EvenSplit(config.num_attention_heads))
        return {**super().attention(config, heads), "self_attn.g_proj": gates}

    @classmethod
    def gates(cls, heads: EvenSplit, each: EvenSplit) -> Entries:
        return {
            "self_attn.forget_gate.A_log": ColumnParallel(each),
            "self_attn.forget_gate.f_proj": ColumnParallel(heads),
            "self_attn.g_proj": ColumnParallel(heads),
        }


class BailingHybridModel(BailingHybridParallel, hf.BailingHybridModel):
    pass


class BailingHybridForCausalLM(BailingHybridParallel, hf.BailingHybridForCausalLM):
    head_plan = LM_HEAD
