"""DBRX: vertically stacked expert matrices, and grouped heads in one clipped projection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import DbrxConfig
from transformers.models.dbrx import modeling_dbrx as hf

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    LocalValue,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.layers.kinds import shards
from oslo_models.layers.local_experts import LocalExperts
from oslo_models.layers.summed import SummedLayer, SummedModule
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit, ExpertWidth


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(SummedModule):
    """Module that takes hidden states, each token's experts and their weights, and loops over ``num_experts``.

    Its parameters have separate entries, with an `ExpertWidth` for each expert.

    Args:
        attributes: see `LocalAttributes`. Values count ranks within the group that shares the width of an expert.
        groups: number of groups of consecutive ranks over which the experts are divided.
    """

    groups: int = 1

    def over_experts(self, groups: int) -> Replicated:
        attributes = {name: _among_sharers(value, groups) for name, value in self.attributes.items()}
        return replace(self, groups=groups, attributes=attributes)


def _among_sharers(value: LocalValue, groups: int) -> LocalValue:
    return lambda n, rank: value(n // groups, rank % (n // groups))


@shards(RoutedExperts)
class RoutedExpertsLayer(LocalExperts, SummedLayer):
    """Experts that take the choices of a router. Each rank computes the tokens of its local experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: ``[rows, positions, hidden]``, replicated.
            top_k_index: the experts of each token, ``[tokens, k]``.
            top_k_weights: the router weights, ``[tokens, k]``.

        Returns:
            ``[rows, positions, hidden]``, replicated.
        """
        if not self.over_ranks:
            return super().forward(hidden_states, top_k_index, top_k_weights)
        with without_override():
            x = self.leave_region(self.enter_region(hidden_states)).flatten(0, -2)  # no dropout is inside
            is_own = (top_k_index >= self.first) & (top_k_index < self.first + self.num_experts)
            weights = copy_to(self.tp, top_k_weights).masked_fill(~is_own, 0)
            tokens, choices = is_own.nonzero(as_tuple=True)
            if not len(tokens):  # a dummy token of weight zero, so that this rank joins the all-reduces of gradients
                tokens = choices = tokens.new_zeros(1)
            index = (top_k_index - self.first).clamp(0, self.num_experts - 1)
            chosen = (x[None, tokens], index[tokens, choices, None], weights[tokens, choices, None])
            computed = super(SummedLayer, self).forward(*chosen)
            output = x.new_zeros(x.shape).index_add(0, tokens, computed.flatten(0, -2))
            return reduce_from(self.tp, output.view(hidden_states.shape))


class DbrxParallel(ParallelModel):
    """Sharding plan of the DBRX family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, count = LlamaParallel.heads(config), config.ffn_config.moe_num_experts
        width = config.ffn_config.ffn_hidden_size
        local = {**LlamaParallel.local_attributes(heads), "hidden_size": heads.query.local_extent}
        matrices = ColumnParallel(*(ExpertWidth(width, expert=number, experts=count) for number in range(count)))
        block = {
            "norm_attn_norm.norm_1": Norm(),
            "norm_attn_norm.attn": LocalAttributes(local),
            "norm_attn_norm.attn.Wqkv": ColumnParallel(heads.query, heads.key_value, heads.key_value),
            "norm_attn_norm.attn.out_proj": RowParallel(heads.query),
            "norm_attn_norm.norm_2": Norm(),
            "ffn.router.layer": Replicated(),
            "ffn.experts": RoutedExperts({"ffn_hidden_size": EvenSplit(width).local_extent}),
            **{f"ffn.experts.mlp.{name}": matrices for name in ("w1", "v1", "w2")},
        }
        return Plan(
            embed={"wte": VocabParallel()},
            blocks={"blocks": block},
            head={"norm_f": Norm()},
        )


class DbrxModel(DbrxParallel, hf.DbrxModel):
    pass


class DbrxForCausalLM(DbrxParallel, hf.DbrxForCausalLM):
    head_plan = LM_HEAD
