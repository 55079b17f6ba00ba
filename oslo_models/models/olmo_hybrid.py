"""OLMo Hybrid: OLMo 2 with gated delta rules, over heads, in place of attention in most blocks."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import OlmoHybridConfig
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.olmo2 import Olmo2Parallel
from oslo_models.models.qwen3_next import Qwen3NextParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class _Rule(Qwen3NextParallel):
    @classmethod
    def projections(cls, key: EvenSplit, value: EvenSplit, gate: EvenSplit) -> Entries:
        sizes = {"q": key, "k": key, "v": value, "a": gate, "b": gate, "g": value}
        return {f"linear_attn.{name}_proj": ColumnParallel(size) for name, size in sizes.items()}


class OlmoHybridParallel(Olmo2Parallel):
    """Sharding plan of the OLMo Hybrid family."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", *Olmo2Parallel.norms)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        renamed = {"linear_attn.norm": "linear_attn.o_norm", "linear_attn.out_proj": "linear_attn.o_proj"}
        rule = {renamed.get(name, name): entry for name, entry in _Rule.linear_attention(config).items()}
        return {**super().attention(config, heads), **rule}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        either = (*cls.attention(config, cls.heads(config)), "input_layernorm", "post_feedforward_layernorm")
        return replace(super().plan(config), optional=either)


class OlmoHybridModel(OlmoHybridParallel, hf.OlmoHybridModel):
    pass


class OlmoHybridForCausalLM(OlmoHybridParallel, hf.OlmoHybridForCausalLM):
    head_plan = LM_HEAD
