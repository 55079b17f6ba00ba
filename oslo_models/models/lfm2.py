"""LFM2: Llama with gated short convolutions in place of attention in most blocks."""

from dataclasses import replace
from typing import Any, ClassVar

from transformers import Lfm2Config
from transformers.models.lfm2 import modeling_lfm2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class Lfm2Parallel(LlamaParallel):
    """Sharding plan of the LFM2 family."""

    norms: ClassVar[tuple[str, ...]] = ("operator_norm", "ffn_norm")
    head_norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    mlp = {
        "feed_forward.w1": ColumnParallel(),
        "feed_forward.w3": ColumnParallel(),
        "feed_forward.w2": RowParallel(),
    }
    convolution = {
        "conv": LocalAttributes(convolution="conv"),
        "conv.in_proj": ColumnParallel(parts=3),
        "conv.conv.weight": ColumnParallel(),  # one filter per channel
        "conv.conv.bias": ColumnParallel(),
        "conv.out_proj": RowParallel(),
    }
    optional = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        attention = dict(super().attention(config, heads))
        attention["self_attn.out_proj"] = attention.pop("self_attn.o_proj")
        return {**attention, **cls.convolution}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        either = tuple(cls.attention(config, cls.heads(config)))
        return replace(plan, head={"embedding_norm": Norm()}, optional=(*cls.optional, *cls.head_norms, *either))


class Lfm2Model(Lfm2Parallel, hf.Lfm2Model):
    pass


class Lfm2ForCausalLM(Lfm2Parallel, hf.Lfm2ForCausalLM):
    head_plan = LM_HEAD
