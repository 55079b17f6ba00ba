"""The named tests catch mistakes in token dispatch to experts, token counts and gradient sums."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.mixtral import modeling_mixtral

from oslo_models.layers.context_experts import ContextExperts
from oslo_models.layers.context_rules import LocalTokensModule
from oslo_models.models import dots3_note_text
from oslo_models.sharding.plan import Norm

from support.mutants import Edit, MutantPool, Patch, load_test
from support.pool import Pool, WorkerError


def auxiliary_loss_of_each_rank(patch: Patch) -> None:
    """Scale the loss as if ranks added up their losses."""
    right = modeling_mixtral.load_balancing_loss_func
    patch.setattr(modeling_mixtral, "load_balancing_loss_func", lambda *args: 3 * right(*args))


def gradient_of_a_rotary_norm_of_each_rank(patch: Patch) -> None:
    """Treat the norm as replicated, as if all ranks computed the same from the key that their heads share."""
    patch.setattr(dots3_note_text, "HeadNorm", Norm)


def whole_tokens_of_each_rank(patch: Patch) -> None:
    """Each of the ranks that would divide longer rows sends all tokens to the experts."""
    patch.setattr(ContextExperts, "of_whole_tokens", LocalTokensModule.of_whole_tokens)


EXCHANGED, FORWARD = "layers.experts:ParallelExperts._exchanged", "layers.experts:ParallelExperts.forward"
CLIPPING = "modeling.training:TrainableModel.clip_grad_norm_"
OVER_REPLICAS, OVER_RANKS = "models/test_experts_over_replicas.py", "models/test_mixture_of_experts.py"
TRAINING, WRAPPED = "test_training_matches_one_process", "test_training_in_wrappers_of_torch_matches_one_process"
SENT = {"wrapper": "DDP", "sizes": (1, 1, 2)}
SENT_AND_SHARDED = {"wrapper": "DDP", "sizes": (2, 1, 4)}
ALL_REPLICAS = {"model_type": "mixtral", "sizes": (1, 1, 2), "replicas": 4, "implementation": "eager"}
PART_OF_RANKS = {"model_type": "mixtral", "sizes": (4, 1, 2), "replicas": 1, "implementation": "eager"}
THREE_RANKS = ("test_step_with_auxiliary_loss_matches_on_three_ranks", {"implementation": "eager"})
DIVIDED = {"model_type": "mixtral", "sizes": (1, 1, 2), "cp": 2, "replicas": 1, "implementation": "eager"}
OF_PARTS = "test_training_with_divided_tokens_matches_one_process"
IDENTITIES = {"model_type": "longcat_flash", "sizes": (1, 1, 2), "replicas": 2, "implementation": "eager"}
BIASES = ("test_experts_over_a_part_of_the_ranks_match", {"model_type": "gpt_oss"})

Row = tuple[Callable[[Patch], None], str, str, dict[str, Any]]
MUTANTS: dict[str, Row] = {
    "outputs return in another order": (
        Edit(EXCHANGED, "index_add(0, tokens, ", "index_add(0, tokens.flip(0), "),
        *(OVER_REPLICAS, WRAPPED, SENT),
    ),
    "counts of another rank": (
        Edit(EXCHANGED, "counts, ones = is_for.sum(0), ", "counts, ones = is_for.sum(0).roll(1), "),
        *(OVER_REPLICAS, WRAPPED, SENT),
    ),
    "tokens for the next rank": (
        Edit(EXCHANGED, "right=True) - 1", "right=True) % axis.size"),
        *(OVER_REPLICAS, WRAPPED, SENT),
    ),
    "half the gradient of sent weights": (
        Edit(EXCHANGED, "weights[tokens])", "weights[tokens] / 2 + weights[tokens].detach() / 2)"),
        *(OVER_REPLICAS, WRAPPED, SENT),
    ),
    "each rank sends all tokens": (
        Edit(EXCHANGED, "even_ranges(len(hidden_states), self.tp.size)[self.tp.rank]", "(0, len(hidden_states))"),
        *(OVER_REPLICAS, WRAPPED, SENT_AND_SHARDED),
    ),
    "gradients of experts are not divided by all replicas": (
        Edit(
            "layers.experts:ParallelExperts._averaged_over_replicas",
            *("self.mesh.dp.size", "self.mesh.expert_replicas.size"),
        ),
        *(OVER_REPLICAS, WRAPPED, SENT),
    ),
    "gradients of experts are those of some replicas": (
        Edit("layers.experts:ParallelExperts._averaged_over_replicas", "self.mesh.expert_replicas", "self.mesh.pp"),
        *(OVER_REPLICAS, TRAINING, ALL_REPLICAS),
    ),
    "gradient of the router is not summed": (
        Edit(FORWARD, "copy_to(self.tp, top_k_weights)", "top_k_weights"),
        *(OVER_RANKS, *THREE_RANKS),
    ),
    "gradient of the router lacks the weights": (
        Edit(FORWARD, "copy_to(self.tp, top_k_weights)", "copy_to(self.tp, top_k_weights.detach())"),
        *(OVER_RANKS, *THREE_RANKS),
    ),
    "auxiliary loss of each rank": (auxiliary_loss_of_each_rank, OVER_RANKS, *THREE_RANKS),
    "experts of the rank before": (
        Edit(
            "layers.experts:ParallelExperts._own", "index - self.first", "(index + 1 - self.first) % self.num_experts"
        ),
        *(OVER_RANKS, *THREE_RANKS),
    ),
    "each sharer adds the whole bias": (
        Edit("layers.experts:ParallelExperts._own_share_of_bias", "shared / self.sharers", "shared"),
        *(OVER_RANKS, *BIASES),
    ),
    "norm counts experts once for each tensor-parallel rank": (
        Edit(CLIPPING, "if self.mesh.tp.rank == 0:", "if self.mesh.tp.size:"),
        *(OVER_REPLICAS, WRAPPED, SENT_AND_SHARDED),
    ),
    "norm counts experts once for each copy": (
        Edit(CLIPPING, "all_reduce(self.mesh.experts, ", "all_reduce(self.mesh.world, "),
        *(OVER_REPLICAS, TRAINING, ALL_REPLICAS),
    ),
    "norm counts the experts of this replica only": (
        Edit(CLIPPING, "all_reduce(self.mesh.experts, sum_of(sorted(over_replicas)), op=op)", "sum_of(over_replicas)"),
        *(OVER_REPLICAS, WRAPPED, SENT),
    ),
    "torch's norm counts the experts of this replica only": (
        Edit(
            "distributed.sharded_tensor.sharding:Sharding.axis.fget",
            *("self.mesh.experts if self.is_over_replicas else self.mesh.tp", "self.mesh.tp"),
        ),
        *(OVER_REPLICAS, TRAINING, ALL_REPLICAS),
    ),
    "gradient of a norm of the shared key is not summed": (
        gradient_of_a_rotary_norm_of_each_rank,
        *(OVER_RANKS, "test_experts_over_a_part_of_the_ranks_match", {"model_type": "dots3_note_text"}),
    ),
    "experts without weights on every rank": (
        Edit("layers.experts:ParallelExperts.set_experts", "else self.tp.rank == 0", "else True"),
        *(OVER_RANKS, "test_experts_without_weights_count_on_one_rank", {}),
    ),
    "experts without weights on no rank of the replicas": (
        Edit("layers.experts:ParallelExperts.set_experts", "rank == last", "False"),
        *(OVER_REPLICAS, TRAINING, IDENTITIES),
    ),
    "experts that compute the tokens of others": (
        Edit("models.llama4_text:ParallelDenseExperts.forward", "[self.first : self.first + self", "[: self"),
        *(OVER_RANKS, "test_experts_over_a_part_of_the_ranks_match", {"model_type": "llama4_text"}),
    ),
    "gradients of experts are divided by ranks of one replica": (
        Edit("layers.experts:ParallelExperts._averaged_over_replicas", "self.mesh.dp.size", "self.mesh.experts.size"),
        *(OVER_REPLICAS, OF_PARTS, DIVIDED),
    ),
    "gradients of experts are summed twice": (
        Edit(
            "layers.experts:ParallelExperts._averaged_over_replicas",
            *(", param, self", ", average_grad(self.mesh.expert_replicas, param, 1), self"),
        ),
        *(OVER_REPLICAS, OF_PARTS, DIVIDED | {"cp": 4}),
    ),
    "divided tokens return in another order": (
        Edit(EXCHANGED, "index_add(0, tokens, ", "index_add(0, tokens.flip(0), "),
        *(OVER_REPLICAS, OF_PARTS, DIVIDED),
    ),
    "whole tokens are sent by each of the ranks that divide others": (
        whole_tokens_of_each_rank,
        *(OVER_REPLICAS, "test_whole_and_divided_tokens_of_replicas_match", {"ep": 3}),
    ),
    "norm counts experts of one group of ranks": (
        Edit(
            "modeling.training:TrainableModel._counted",
            "in layout.owned_indices(rank)]",
            "in layout.owned_indices(rank) if not layout.first_ranges or rank < 2]",
        ),
        *(OVER_REPLICAS, TRAINING, PART_OF_RANKS),
    ),
}
FAST = {
    "outputs return in another order",
    "norm counts experts once for each tensor-parallel rank",
    "gradients of experts are summed twice",
    "gradient of the router is not summed",
    "norm counts experts of one group of ranks",
}


@pytest.mark.parametrize(
    "mutant", [name if name in FAST else pytest.param(name, marks=pytest.mark.zoo) for name in MUTANTS]
)
def test_mistake_is_caught(pool: Pool, tmp_path: Path, seed: int, mutant: str) -> None:
    """The test passes without the mistake, and fails by an assertion with it."""
    make, file, name, arguments = MUTANTS[mutant]
    test = load_test(file, name)
    given = {"tmp_path": tmp_path, "seed": seed} | arguments
    assert given.keys() | {"pool"} == inspect.signature(test).parameters.keys()
    with pytest.raises(WorkerError) as caught:
        test(MutantPool(pool, make), **given)
    failures = list(caught.value.failures.values())
    assert all("AssertionError" in failure for failure in failures), failures
