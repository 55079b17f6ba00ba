"""Every class of the founding architectures matches the class of transformers on one to five ranks."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oslo_models import registry

from support import zoo
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    full_parameters,
    parallel_model,
    reference_model,
    reference_step,
    shard_differences,
    step_differences,
    train,
)

OTHERS = {
    "bert-untied": (2, 3),
    "bert-decoder": (2, 3),
    "gpt2-untied": (2, 3),
    "gpt2-cross": (2, 3),
    "gpt2-12-heads": (5,),
    "gpt_neo-untied": (2,),
    "gptj-tied": (3,),
    "llama-untied": (3,),
    "llama-9-heads": (2, 4),
    "llama-one-kv": (2, 3),
    "t5-gated-untied": (2, 3),
}

STEPS = {"SGD": 1, "AdamW": 3}


@lru_cache(maxsize=64)
def reference(variant: str, name: str, seed: int, dtype: torch.dtype) -> Step:
    return reference_step(name, zoo.config(variant), seed, dtype)


def check_steps(steps: list[Step], tensor_parallel_size: int, dtype: torch.dtype, tolerance: float) -> None:
    """On every rank: outputs, loss and gradients of each step match the reference."""
    lines = []
    for step in steps:
        model = parallel_model(step.name, step.config, step.weights, tensor_parallel_size, dtype, gather_logits=True)
        lines += [f"{step.name}: {line}" for line in step_differences(model, step, tolerance)]
    assert not lines, "\n".join(lines)


def test_every_architecture_has_a_variant() -> None:
    assert {model_type for model_type, _ in zoo.VARIANTS.values()} == set(zoo.FOUNDING)
    assert set(zoo.FOUNDING) <= zoo.VARIANTS.keys()
    assert zoo.VARIANTS.keys() - set(zoo.FOUNDING) == OTHERS.keys()


@pytest.mark.drawn(6)
@pytest.mark.parametrize("variant", zoo.VARIANTS)
def test_step_on_one_rank_is_bitwise_equal_to_transformers(variant: str, seed: int) -> None:
    """In float32, as transformers computes, without a process group."""
    steps = [reference(variant, name, seed, torch.float32) for name in zoo.heads(variant)]
    check_steps(steps, 1, torch.float32, tolerance=0)


@pytest.mark.drawn(6)
@pytest.mark.stacks
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_step_of_every_head_matches_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    steps = [reference(variant, name, seed, torch.float64) for name in zoo.heads(variant)]
    pool.run(n, check_steps, steps, n, torch.float64, TOLERANCE)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("variant", "n"), [(variant, n) for variant, sizes in OTHERS.items() for n in sizes])
def test_step_of_other_variants_matches_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    names = [zoo.base(variant), zoo.lm_head(variant)]
    steps = [reference(variant, name, seed, torch.float64) for name in names]
    pool.run(n, check_steps, steps, n, torch.float64, TOLERANCE)


def check_shares(step: Step, folder: Path, shares: list[int], options: dict[str, Any]) -> None:
    """On every rank: the parts are unequal, and the step, generation and trained weights match the reference."""
    n = len(shares)
    options = {**options, "gather_logits": True, "tensor_parallel_shares": shares}
    model = parallel_model(step.name, step.config, step.weights, n, **options)
    sizes = [sum(math.prod(layout.local_shape(rank)) for layout in model.layouts.values()) for rank in range(n)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1.2 * sizes[-1], sizes
    lines = step_differences(model, step)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    prompt = {key: value for key, value in step.batch.items() if "labels" not in key and "decoder" not in key}
    tokens = model.eval().generate(**prompt, do_sample=False, max_new_tokens=5)
    assert torch.equal(tokens, expected["tokens"])
    train(model.train(), [step.batch] * 3, "AdamW")
    lines += shard_differences(model, "AdamW:", dict(model.named_parameters()), expected["trained"], TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("variant", ["llama", "gpt2-12-heads", "mixtral", "t5", "llama-one-kv", "bloom"])
def test_unequal_shares_match_transformers(pool: Pool, tmp_path: Path, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    options = {"experts_implementation": "eager"} if variant == "mixtral" else {}  # grouped products take no float64
    step = reference_step(name, config, seed, torch.float64, **options)
    model = reference_model(name, config, seed, **options)
    prompt = {key: value for key, value in step.batch.items() if "labels" not in key and "decoder" not in key}
    tokens = model.eval().generate(**prompt, do_sample=False, max_new_tokens=5)
    train(model.train(), [step.batch] * 3, "AdamW")
    torch.save({"tokens": tokens, "trained": full_parameters(model)}, tmp_path / "expected.pt")
    pool.run(3, check_shares, step, tmp_path, [3, 2, 1], options)


def check_training(
    name: str,
    config: PreTrainedConfig,
    weights: dict[str, Tensor],
    batches: list[dict[str, Any]],
    trained: dict[str, dict[str, Tensor]],
    tensor_parallel_size: int,
) -> None:
    """On every rank: the parameters after training with each optimizer match the reference."""
    lines = []
    for optimizer, expected in trained.items():
        model = parallel_model(name, config, weights, tensor_parallel_size)
        train(model, batches[: STEPS[optimizer]], optimizer)
        lines += shard_differences(model, f"{optimizer}:", dict(model.named_parameters()), expected, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_parameters_after_training_match_transformers(pool: Pool, variant: str, n: int, seed: int) -> None:
    """One step of SGD, where AdamW's scale invariance cannot hide errors, and three steps of AdamW."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    weights = full_parameters(reference_model(name, config, seed))
    batches = [zoo.batch(name, config, seed + i) for i in range(3)]
    trained = {}
    for optimizer, steps in STEPS.items():
        model = reference_model(name, config, seed)
        train(model, batches[:steps], optimizer)
        trained[optimizer] = full_parameters(model)
    pool.run(n, check_training, name, config, weights, batches, trained, n)


def check_initialisation(name: str, config: PreTrainedConfig, full: dict[str, Tensor], seed: int, n: int) -> None:
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, n, seed=seed)
    lines = shard_differences(model, "initial", dict(model.named_parameters(remove_duplicate=False)), full, 0)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "llama-one-kv", "t5-gated-untied"])
def test_from_config_seed_gives_the_same_weights_at_every_tensor_parallel_size(
    pool: Pool, variant: str, seed: int
) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    cls: Any = registry.find(name)
    full = full_parameters(cls.from_config_with_parallel(config, seed=seed))
    other = full_parameters(cls.from_config_with_parallel(config, seed=seed + 1))
    assert any(not torch.equal(full[name], other[name]) for name in full)
    for n in (2, 3):
        pool.run(n, check_initialisation, name, config, full, seed, n)


def check_loaded(name: str, folder: Path, full: dict[str, Tensor], n: int) -> None:
    model = registry.find(name).from_pretrained_with_parallel(folder, n)  # type: ignore[attr-defined]
    lines = shard_differences(model, "loaded", dict(model.named_parameters(remove_duplicate=False)), full, 0)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["mamba", pytest.param("mamba2", marks=pytest.mark.zoo)])
def test_initialisation_leaves_loaded_weights(pool: Pool, tmp_path: Path, variant: str, seed: int) -> None:
    """transformers itself scales these weights on every load."""
    name, config = zoo.lm_head(variant), zoo.config(variant, rescale_prenorm_residual=True)
    model = reference_model(name, config, seed)
    model.save_pretrained(tmp_path)
    for n in (1, 2):
        pool.run(n, check_loaded, name, tmp_path, full_parameters(model), n)
