"""Doge: Llama with attention masks made of the values, scaled residuals and, in some sizes, experts of two vectors.

The masks of all heads are summed over the values of all ranks; each rank keeps the masks of its heads. Routers are
replicated, as in other mixtures of experts. They mix the tokens of a batch, so its rows depend on each other. In the
first block, equal tokens tie for the last place in a mask. The number of keys, with padding, decides which token stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DogeConfig
from transformers.models.doge import modeling_doge as hf

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.layers.entries import ColumnParallel, Entries, InnerRowParallel, Plan, Replicated
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.local_attributes import LocalAttributes, localize
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


@dataclass(frozen=True)
class VectorExperts(LocalAttributes):
    """Mixture of experts with one pair of vectors per expert and one feature between them. Ranks shard each vector.

    The vectors are rows of two embeddings ``down_embed`` and ``up_embed``, which have separate entries.

    Source: He, "Mixture of a Million Experts", 2024.
    """


@shards(VectorExperts)
class VectorExpertsLayer(ShardedModule):
    """Mixture that multiplies its input by rows of ``down_embed``, and the result by rows of ``up_embed``.

    The forward calls ``torch.matmul`` for both products. Input and output are replicated.
    """

    down_embed: Any

    def configure(self, entry: VectorExperts, context: ShardingContext) -> None:
        super().configure(entry, context)
        localize(self, entry, context)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        layout = self.down_embed.layouts["weight"]
        sizes, size = [stop - start for ((start, stop),) in layout.ranges], layout.shape[1]

        def product(left: Tensor, right: Tensor) -> Tensor:
            if right.shape[-2] == size and right.shape[-1] == 1:  # rows [tokens, chosen, local] by [tokens, hidden, 1]
                return reduce_from(self.tp, torch.matmul(left, scatter_to(self.tp, right, -2, sizes)))
            return gather_from(self.tp, torch.matmul(copy_to(self.tp, left), right), -1, sizes)

        with FunctionOverrides({torch.matmul: product}):
            return super().forward(hidden_states, **kwargs)


class DogeParallel(LlamaParallel):
    """Sharding plan of the Doge family."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    optional = ("mlp.router_gate", "mlp.down_embed", "mlp.up_embed")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        each = replace(heads, head_dim=1).key_value
        return {
            **super().attention(config, heads),
            "self_attn.A": ColumnParallel(each),
            "self_attn.dt_proj": InnerRowParallel(heads.key_value, outputs=each),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        block = {**plan.blocks["layers"], "input_residual": Replicated(), "post_attention_residual": Replicated()}
        if not config.is_moe:
            return replace(plan, blocks={"layers": block})
        experts: Entries = {
            "mlp": VectorExperts(),
            **gated_mlp("mlp"),
            "mlp.router_gate": Replicated(),
            "mlp.down_embed": ColumnParallel(transposed=True),
            "mlp.up_embed": ColumnParallel(transposed=True),
        }
        return replace(
            plan,
            blocks={"layers": {**block, **experts}},
        ).with_rules(single_stage_reason="routers mix the rows of a batch, so that micro-batches choose other experts")


class DogeModel(DogeParallel, hf.DogeModel):
    pass


class DogeForCausalLM(DogeParallel, hf.DogeForCausalLM):
    head_plan = LM_HEAD


class DogeForSequenceClassification(DogeParallel, hf.DogeForSequenceClassification):
    head_plan = SCORE
