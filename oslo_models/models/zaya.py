"""ZAYA: Mixtral with convolutions over queries and keys of each head; half of the values are of the previous token.

One half of the value channels is projected from the token itself, the other half from the previous token. Each rank has
the channels of its heads, which may all be in one half. Routers and the states that they pass on are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import ZayaConfig
from transformers.models.zaya import modeling_zaya as hf

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Plan, Replicated, RowParallel
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.local_attributes import localize
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads, Window


@dataclass(frozen=True)
class GroupMeans(LocalAttributes):
    """Module that takes the mean over all query heads of each key-value head, across ranks.

    Args:
        heads: the split of the heads.
    """

    heads: GroupedHeads = field(kw_only=True)


@shards(GroupMeans)
class GroupMeansLayer(ShardedModule):
    """Module that calls ``mean`` on an activation ``[..., local groups, local heads of each, features]``.

    With more ranks than groups, several ranks share the heads of a group, and the mean is taken over these ranks.

    Attributes:
        heads: the query heads, grouped by key-value head.
    """

    heads: GroupedHeads

    def configure(self, entry: GroupMeans, context: ShardingContext) -> None:
        super().configure(entry, context)
        localize(self, entry, context)
        self.heads = entry.heads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.tp.size <= self.heads.kv_heads:
            return super().forward(*args, **kwargs)
        start, stop = self.heads.key_value.unit_ranges(self.tp.size)[self.tp.rank]

        def mean(x: Tensor, dim: int) -> Tensor:
            sums = F.pad(x.sum(dim), (0, 0, start, self.heads.kv_heads - stop))  # of all groups
            return copy_to(self.tp, reduce_from(self.tp, sums))[..., start:stop, :] / self.heads.group

        with FunctionOverrides({Tensor.mean: mean}):
            return super().forward(*args, **kwargs)


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
            "self_attn": LocalAttributes(local),
            **{f"self_attn.qkv_proj.{name}".rstrip("."): entry for name, entry in projections.items()},
            "self_attn.qk_norm": LocalAttributes(),
            "self_attn.qk_norm.temp": ColumnParallel(each.key_value),
            "self_attn.o_proj": RowParallel(query),
        }

    @staticmethod
    def convolution(name: str, groups: GroupedHeads, filters: ColumnParallel) -> Entries:
        """Return the plan entries of a grouped convolution over query and key channels."""

        def count(n: int, rank: int) -> int:
            return groups.query.local_extent(n, rank) + groups.key_value.local_extent(n, rank)

        return {name: LocalAttributes({"groups": count}), f"{name}.weight": filters, f"{name}.bias": filters}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        scaled: Entries = {f"input_hidden_states_{name}": Replicated() for name in ("scale", "bias")}
        return replace(
            plan,
            embed={**plan.embed, **scaled},
        ).with_rules(single_stage_reason="routers pass states on to the routers of the next blocks")


class ZayaModel(ZayaParallel, hf.ZayaModel):
    pass


class ZayaForCausalLM(ZayaParallel, hf.ZayaForCausalLM):
    head_plan = LM_HEAD
