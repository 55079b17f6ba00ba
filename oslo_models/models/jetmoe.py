"""JetMoE: Llama with experts in place of MLPs and of query and output projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import JetMoeConfig
from transformers.models.jetmoe import modeling_jetmoe as hf

from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Replicated, RowParallel
from oslo_models.layers.kinds import shards
from oslo_models.layers.local_experts import LocalExperts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads, Layout, check_groups, even_ranges


@dataclass(frozen=True)
class StackedColumnParallel(Replicated):
    """Module with one linear layer per expert, ``weight [experts, out, in]``, and sharded output features.

    Its forward takes the inputs sorted by expert and the number of inputs per expert (``num_experts`` numbers).

    Args:
        parts: number of matrices of equal size that each layer concatenates.
        groups: number of groups of consecutive ranks over which the experts are divided.
    """

    parts: int = 1
    groups: int = 1

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, 1, n)

    def over_experts(self, groups: int) -> Replicated:
        return replace(self, groups=groups)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        check_groups(self.groups, shape[0], n)
        share = n if self.groups == 1 else n // self.groups
        width = Layout.sharded(shape, dim, (EvenSplit(shape[dim] // self.parts),) * self.parts, share)
        return width if self.groups == 1 else width.over_groups(even_ranges(shape[0], self.groups), share)


@shards(StackedColumnParallel)
class StackedColumnLayer(LocalExperts):
    """One linear layer per expert, with sharded output features."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Return the outputs of the local experts.

        Args:
            inputs: ``[rows, in]``, replicated and sorted by expert.
            expert_size: number of rows of each expert.

        Returns:
            ``[local rows, local out]``.
        """
        with without_override():
            before, own = self.own_sizes(expert_size)
            local = self.enter_region(inputs)[before : before + sum(own)]
            output: Tensor = super().forward(local, own)
            return output


@dataclass(frozen=True)
class StackedRowParallel(StackedColumnParallel):
    """Like `StackedColumnParallel`, with sharded input features. The outputs are all-reduced."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, 2, n)


@shards(StackedRowParallel)
class StackedRowLayer(LocalExperts):
    """One linear layer per expert, with sharded input features."""

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        """Return the outputs of all experts.

        Args:
            inputs: ``[local rows, local in]``, the inputs of the local experts.
            expert_size: number of rows of each expert, including remote experts.

        Returns:
            ``[rows, out]``, replicated.
        """
        with without_override():
            before, own = self.own_sizes(expert_size)
            output: Tensor = super().forward(self.leave_region(inputs), own)
            after = sum(expert_size) - before - sum(own)
            return reduce_from(self.tp, F.pad(output, (0, 0, before, after)) if self.over_ranks else output)


class JetMoeParallel(LlamaParallel):
    """Sharding plan of the JetMoE family.

    Attention experts are always sharded over heads, regardless of ``expert_parallel_size``. A rank therefore computes
    attention for its heads only, and stores only their keys and values. Its share of the weights is the same.
    """

    mlp = {
        "mlp.router": Replicated(),
        "mlp.input_linear": StackedColumnParallel(parts=2),
        "mlp.output_linear": StackedRowParallel(),
        "mlp.bias": Replicated(),
    }

    @classmethod
    def attention_groups(cls, config: Any) -> int:
        return int(config.num_experts_per_tok)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        own = EvenSplit(config.num_key_value_heads, config.kv_channels)  # each has one query head per chosen expert
        experts = "self_attention.experts"
        return {
            "self_attention.kv_proj": ColumnParallel(own, own),
            experts: LocalAttributes({"hidden_size": own.local_extent}),
            f"{experts}.router": Replicated(),
            f"{experts}.input_linear": ColumnParallel(own, dim=1),
            f"{experts}.output_linear": RowParallel(own),
            f"{experts}.bias": Replicated(),
        }


class JetMoeModel(JetMoeParallel, hf.JetMoeModel):
    pass


class JetMoeForCausalLM(JetMoeParallel, hf.JetMoeForCausalLM):
    head_plan = LM_HEAD


class JetMoeForSequenceClassification(JetMoeParallel, hf.JetMoeForSequenceClassification):
    head_plan = SCORE
