"""ZAYA: Mixtral with convolutions over queries and keys of each head; half of the values are of the previous token.

One half of the value channels is projected from the token itself, the other half from the previous token. Each rank has
the channels of its heads, which may all be in one half. Routers and the states that they pass on are replicated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import ZayaConfig
from transformers.models.zaya import modeling_zaya as hf
from transformers.models.zaya.modeling_zaya import ZayaPreTrainedModel

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads, Window
from oslo_models.sharding.plan import ColumnParallel, Entries, GroupMeans, LocalModule, Plan, Replicated, RowParallel


class ZayaParallel(LlamaParallel):
    """Sharding plan of the ZAYA family."""

    mlp = {
        **mixture_of_experts(),
        "post_attention_residual_scale": Replicated(),
        "post_mlp_residual_scale": Replicated(),
    }

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        query, key_value, each = heads.query, heads.key_value, replace(heads, head_dim=1)
        half, local = key_value.extent() // 2, cls.local_attributes(heads)
        filters = ColumnParallel(query, key_value)
        projections: Entries = {
            "": GroupMeans(local, heads=heads),
            "q_proj": ColumnParallel(query),
            "k_proj": ColumnParallel(key_value),
            "v_proj_current": ColumnParallel(Window(half, whole=key_value, first=0)),
            "v_proj_delayed": ColumnParallel(Window(half, whole=key_value, first=half)),
            **cls.convolution("conv_qk_depthwise", heads, filters),
            **cls.convolution("conv_qk_grouped", each, filters),
        }
        return {
            "self_attn": LocalModule(local),
            **{f"self_attn.qkv_proj.{name}".rstrip("."): entry for name, entry in projections.items()},
            "self_attn.qk_norm": LocalModule(),
            "self_attn.qk_norm.temp": ColumnParallel(each.key_value),
            "self_attn.o_proj": RowParallel(query),
        }

    @staticmethod
    def convolution(name: str, groups: GroupedHeads, filters: ColumnParallel) -> Entries:
        """Return the plan entries of a grouped convolution over query and key channels."""

        def count(n: int, rank: int) -> int:
            return groups.query.local_extent(n, rank) + groups.key_value.local_extent(n, rank)

        return {name: LocalModule({"groups": count}), f"{name}.weight": filters, f"{name}.bias": filters}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        scaled: Entries = {f"input_hidden_states_{name}": Replicated() for name in ("scale", "bias")}
        return replace(
            plan,
            embed={**plan.embed, **scaled},
            single_stage_reason="routers pass states on to those of the next blocks",
        )


class ZayaModel(ZayaParallel, hf.ZayaModel):
    pass


class ZayaForCausalLM(ZayaParallel, hf.ZayaForCausalLM):
    head_plan = LM_HEAD
