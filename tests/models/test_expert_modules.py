"""Expert parallelism for experts outside the stacks ``gate_up_proj`` and ``down_proj``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from oslo_models import registry

from support import pipelines, zoo
from support.experts import load, own_differences
from support.float64 import lifted_casts
from support.generation import BEAMS, Tokens, generate_tokens, token_differences
from support.pool import Pool
from support.reference import (
    Step,
    make_optimizer,
    reference_model,
    saved_step,
    step_differences,
)

Sizes = tuple[int, int]
"""The tensor-parallel and the expert-parallel size."""

CHANGES: dict[str, dict[str, Any]] = {
    "dbrx": {"ffn_config": {**zoo.MORE["dbrx"]["ffn_config"], "moe_loss_weight": 0.5}},
    "jetmoe": {"num_key_value_heads": 4, "aux_loss_coef": 0.5},
    "nllb-moe": {"router_aux_loss_coef": 0.5},
    "switch_transformers": {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.5},
}
"""Changes that include the auxiliary loss, with enough heads for four ranks."""

EXPERTS = {
    "dbrx": r"\.experts\.mlp\.",
    "jetmoe": "_linear.weight",
    "nllb-moe": r"\.experts\..*(fc1\.|fc2\.weight)",
    "switch_transformers": r"\.experts\.",
}
"""Pattern of the names of sharded expert parameters."""


def given_case(model_type: str, seed: int, folder: Path, **changes: Any) -> tuple[Step, pipelines.Case, Tokens]:
    """Compute a step with auxiliary loss, parameters after optimizer steps, and tokens, on one process."""
    name, config = zoo.main_head(model_type), zoo.config(model_type, **CHANGES[model_type], **changes)
    routed = {"output_router_logits": True}
    batch = {**pipelines.batch(name, config, seed), **routed}
    step = saved_step(name, config, seed, batch, folder)
    without = reference_model(name, config, seed)(**{**batch, "output_router_logits": False})
    assert abs(step.value - without.loss) > 0.01
    batches = [[{**pipelines.batch(name, config, seed + 10 * number), **routed}] for number in range(3)]
    case = pipelines.case(name, config, seed, optimizers=pipelines.STEPS, batches=batches)
    return step, case, generate_tokens(reference_model(name, config, seed), batch, BEAMS)


def check_step(folder: Path, step: Step, sizes: Sizes) -> None:
    cls: Any = registry.find(step.name)
    model = cls.from_pretrained_with_parallel(
        folder, sizes[0], expert_parallel_size=sizes[1], gather_logits=True
    ).train()
    lines = step_differences(model, step)
    assert not lines, "\n".join(lines)


def check_everything(folder: Path, step: Step, case: pipelines.Case, tokens: Tokens, sizes: Sizes) -> None:
    tp, ep = sizes
    model = load(folder, case, (tp, 1, ep), gather_logits=True)
    lines = step_differences(model, step) + token_differences(model, step.batch, tokens, BEAMS)
    for optimizer, steps in pipelines.STEPS.items():
        model = load(folder, case, (tp, 1, ep), gather_logits=True)
        stepper = make_optimizer(optimizer, model.parameters())
        for (batch,) in case.batches[:steps]:
            stepper.zero_grad()
            with lifted_casts():
                model(**batch).loss.backward()
            stepper.step()
        own = {name: param.detach() for name, param in model.named_parameters(remove_duplicate=False)}
        lines += own_differences(model, f"{optimizer}: parameter", own, case.trained[optimizer])
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), pytest.param((4, 2), marks=pytest.mark.zoo)])
@pytest.mark.parametrize("model_type", zoo.cases(CHANGES))
def test_steps_and_tokens_match_one_process(
    pool: Pool, tmp_path: Path, seed: int, model_type: str, sizes: Sizes
) -> None:
    """Five experts; loss, auxiliary loss, gradients, steps of optimizers, and tokens with beams."""
    given = given_case(model_type, seed, tmp_path)
    pool.run(sizes[0], check_everything, tmp_path, *given, sizes)


FEW_TOKENS: dict[str, dict[str, Any]] = {
    "dbrx": {"ffn_config": {**zoo.MORE["dbrx"]["ffn_config"], "moe_top_k": 1}},
    "jetmoe": {"num_experts_per_tok": 1},
    "nllb-moe": {},
    "switch_transformers": {},
}
"""Types with one expert per token."""


@pytest.mark.parametrize("model_type", zoo.cases(FEW_TOKENS))
def test_experts_without_tokens_have_the_gradients_of_one_process(
    pool: Pool, tmp_path: Path, seed: int, model_type: str
) -> None:
    """With two tokens and three ranks, at least one rank's experts receive no token."""
    name, config = zoo.main_head(model_type), zoo.config(model_type, **FEW_TOKENS[model_type])
    batch = {key: value[:1, -2:] for key, value in zoo.batch(name, config, seed).items()}
    step = saved_step(name, config, seed, {**batch, "labels": torch.ones(1, 2, dtype=torch.long)}, tmp_path)
    pool.run(3, check_step, tmp_path, step, (3, 3))


def step_on_stages(given: pipelines.Case) -> None:
    model = pipelines.case_on_stages(given, 2, 2, expert_parallel_size=2, micro_batch_size=2)
    loss = pipelines.run_micro_batches(model, given.batches[0][0])
    lines = pipelines.gradient_differences(model, given.gradients)
    assert (loss - given.loss[0]).abs() < 1e-10 and not lines, (loss, given.loss, lines)


@pytest.mark.zoo
@pytest.mark.parametrize("model_type", CHANGES)
def test_step_on_two_stages_matches(pool: Pool, seed: int, model_type: str) -> None:
    config = zoo.config(model_type, **CHANGES[model_type])
    pool.run(4, step_on_stages, pipelines.case(zoo.main_head(model_type), config, seed))


def check_shares(model_type: str, full: dict[str, torch.Tensor], seed: int, sizes: Sizes) -> None:
    """Random weights match one process, and each rank holds its share of the experts."""
    cls: Any = registry.find(zoo.main_head(model_type))
    config = zoo.config(model_type, **CHANGES[model_type])
    model = cls.from_config_with_parallel(config, sizes[0], seed=seed, expert_parallel_size=sizes[1])
    lines = own_differences(model, "initial", {name: param.detach() for name, param in model.named_parameters()}, full)
    assert not lines, "\n".join(lines)
    experts = [name for name, _ in model.named_parameters() if re.search(EXPERTS[model_type], name)]
    own, whole = (sum(each[name].numel() for name in experts) for each in (dict(model.named_parameters()), full))
    totals = pipelines.gather_from_all_ranks(own)
    assert experts and sum(totals) == whole, (totals, whole)


@pytest.mark.parametrize("model_type", zoo.cases(CHANGES))
def test_ranks_hold_their_share_of_the_same_random_experts(pool: Pool, seed: int, model_type: str) -> None:
    cls: Any = registry.find(zoo.main_head(model_type))
    config = zoo.config(model_type, **CHANGES[model_type])
    model = cls.from_config_with_parallel(config, seed=seed)
    full = {name: param.detach() for name, param in model.named_parameters()}
    for sizes in ((2, 1), (2, 2), (3, 3), (4, 2)):
        pool.run(sizes[0], check_shares, model_type, full, seed, sizes)


def refuse_sizes(model_type: str, tp: int, ep: int, says: str) -> None:
    cls: Any = registry.find(zoo.main_head(model_type))
    with pytest.raises(ValueError, match=says):
        cls.from_config_with_parallel(zoo.config(model_type), tp, expert_parallel_size=ep)


@pytest.mark.parametrize("model_type", zoo.cases(CHANGES))
def test_experts_over_replicas_are_refused_by_name(pool: Pool, model_type: str) -> None:
    pool.run(2, refuse_sizes, model_type, 1, 2, "send no token to other replicas.* most tensor_parallel_size=1")
