"""Llama 4, its text model: Llama with routed and shared experts; every expert computes every token."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from transformers import Llama4TextConfig
from transformers.models.llama4 import modeling_llama4 as hf

from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.entries import Experts, Replicated
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.kinds import shards
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class DenseExperts(Experts):
    """Stacked gated experts that all compute every token. The router weights the tokens before (Llama 4).

    The input repeats the tokens of the batch for each expert, and no token is dispatched. So expert parallelism divides
    the experts over the ranks of one replica only.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if self.groups > n:
            raise ValueError(
                f"expert_parallel_size={self.groups} sends tokens to the experts of other replicas, but each of these "
                f"experts computes every token: use at most tensor_parallel_size={n}"
            )
        return super().layout(leaf, shape, n)


@shards(DenseExperts)
class ParallelDenseExperts(ParallelExperts):
    """Experts that all compute every token. See `DenseExperts`."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs of all experts.

        Args:
            hidden_states: ``[experts * tokens, hidden]``, replicated: the tokens weighted for the first expert, then
                for the second expert, and so on.

        Returns:
            ``[experts * tokens, hidden]``, replicated.
        """
        count, hidden = self.layouts["down_proj"].shape[0], hidden_states.shape[-1]
        with without_override():
            own = self.enter_region(hidden_states).view(count, -1, hidden)
            if self.over_ranks:
                own = own[self.first : self.first + self.num_experts]
            own = self.leave_region(own.flatten(0, 1))
            output: Tensor = super(ParallelExperts, self).forward(own)  # transformers' forward, as there is no routing
            if self.over_ranks:
                after = count - self.first - self.num_experts
                output = F.pad(output.view(self.num_experts, -1, hidden), (0, 0, 0, 0, self.first, after)).flatten(0, 1)
            return reduce_from(self.tp, output)


class Llama4Parallel(LlamaParallel):
    """Sharding plan of the Llama 4 family."""

    mlp = {
        **gated_mlp("feed_forward"),
        "feed_forward.router": Replicated(),
        "feed_forward.experts": DenseExperts(transposed=True),
        **gated_mlp("feed_forward.shared_expert"),
    }
    optional = tuple(mlp)


class Llama4TextModel(Llama4Parallel, hf.Llama4TextModel):
    pass


class Llama4ForCausalLM(Llama4Parallel, hf.Llama4ForCausalLM):
    base_model_prefix = "model"  # the prefix in transformers' class names no module
    head_plan = LM_HEAD
