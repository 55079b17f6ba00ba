"""Experts that compute few tokens one expert at a time, compared with transformers in one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models.fusion import experts

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.mutants import Edit, with_mutant
from support.pool import Pool
from support.reference import TOLERANCE, differences, full_parameters, reference_model

TOKENS = (1, 3, 16, 17)


def batches(config: Any, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, config.get_text_config().vocab_size, (1, n), generator=generator) for n in TOKENS]


def check(
    name: str, config: Any, weights: Mapping[str, Tensor], sizes: tuple[int, int], seed: int, expected: list[Tensor]
) -> None:
    tp, ep = sizes
    options = {"expert_parallel_size": ep, "experts_implementation": "eager"}
    model = pipelines.model_on_stages(name, config, weights, tp, 1, **options).eval()
    model.fuse(measure=False)
    (row,) = (row for row in model.fusion_report() if row.operation == "experts")
    assert row.fused, row
    counts: list[int] = []

    def counted(module: Any, hidden_states: Tensor, *args: Any) -> Tensor:
        counts.append(len(hidden_states))
        return right(module, hidden_states, *args)

    right = experts.few_tokens
    with torch.no_grad(), lifted_casts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "few_tokens", counted)
        for ids, logits in zip(batches(config, seed), expected, strict=True):
            lines = differences("logits", model(input_ids=ids, use_cache=False).logits, logits, TOLERANCE)
            assert not lines, (ids.shape, lines)
    assert counts and max(counts) <= 16
    assert set(counts) == {1, 3, 16} or model.mesh.has_experts_over_replicas  # tokens of all replicas together
    before = len(counts)
    model(input_ids=batches(config, seed)[1]).logits.sum().backward()  # transformers computes passes with gradients
    assert len(counts) == before


def check_choices(seed: int) -> None:
    """Compare repeated, unused and remote experts with a sum over all choices."""
    torch.manual_seed(seed)
    name, config = zoo.main_head("mixtral"), zoo.config("mixtral")
    stack = reference_model(name, config, seed).model.layers[0].mlp.experts
    count, width = stack.num_experts, stack.down_proj.shape[-2]
    for tokens, k in ((1, 2), (2, 2), (3, 2), (3, 4), (16, 2)):
        hidden = torch.randn(tokens, width, dtype=stack.down_proj.dtype)
        index, weights = torch.randint(0, count + 1, (tokens, k)), torch.rand(tokens, k, dtype=hidden.dtype)
        with torch.no_grad():
            expected = torch.zeros_like(hidden)
            for token, choice in itertools.product(range(tokens), range(k)):
                if (expert := int(index[token, choice])) < count:
                    gate, up = (hidden[token] @ stack.gate_up_proj[expert].T).chunk(2)
                    expected[token] += weights[token, choice] * (stack.act_fn(gate) * up @ stack.down_proj[expert].T)
            torch.testing.assert_close(experts.few_tokens(stack, hidden, index, weights), expected)


@pytest.mark.parametrize("shift", range(4))
def test_each_choice_of_an_expert_counts(seed: int, shift: int) -> None:
    check_choices(seed + shift)


def test_experts_chosen_twice_are_not_taken_for_experts_of_all_tokens() -> None:
    mistake = Edit("fusion.experts:few_tokens", "if is_for_all:\n", "if len(rows) == tokens:\n")
    with pytest.raises(AssertionError):
        with_mutant(mistake, lambda: [check_choices(seed) for seed in range(20)])


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        *(("mixtral", (2, ep)) for ep in (1, 2)),
        ("gpt_oss", (1, 1)),
        pytest.param("gpt_oss", (4, 2), marks=pytest.mark.zoo),
        ("nemotron_h", (2, 2)),
        pytest.param("mixtral", (1, 2), marks=pytest.mark.zoo),
    ],
)
def test_few_tokens_match_transformers(pool: Pool, seed: int, model_type: str, sizes: tuple[int, int]) -> None:
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    model = reference_model(name, config, seed).eval()
    weights = {**model.state_dict(), **full_parameters(model)}
    with torch.no_grad(), lifted_casts():
        expected = [model(input_ids=ids, use_cache=False).logits for ids in batches(config, seed)]
    pool.run(max(sizes), check, name, config, weights, sizes, seed, expected)
