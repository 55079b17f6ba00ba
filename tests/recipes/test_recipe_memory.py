"""The memory of a recipe is planned before processes start: sizes that fit are chosen, others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import oslo_models
from oslo_models.planning.memory import Estimate
from oslo_models.planning.sizes import FREE, Devices
from oslo_models.recipes.checks import model_class
from oslo_models.recipes.memory import job_of, plan_sizes
from oslo_models.recipes.parsing import parse
from oslo_models.recipes.sizes import Sizes, choose_sizes

from support.recipes import write_model, write_recipe


def _planned(recipe: Path, devices: tuple[int, ...], *flags: str) -> Sizes:
    parsed = parse("sft", [str(recipe), *flags])
    cls, config = model_class(parsed)
    sizes = choose_sizes(parsed.parallel, cls, config, gpus=len(devices))
    return plan_sizes(parsed, sizes, cls, config, Devices(devices))


def _device(found: Estimate) -> int:
    """Return the memory of a device on which every rank just fits."""
    return int(found.largest.total * 1.001 / (1 - FREE)) + 1


def test_sizes_that_fit_are_chosen_and_others_refused(tmp_path: Path, seed: int) -> None:
    write_model(tmp_path, seed)
    recipe = write_recipe(tmp_path, "sft", seed, max_length=32)
    parsed = parse("sft", [str(recipe)])
    cls, config = model_class(parsed)
    job = job_of(parsed, cls, config)
    assert (job.task, job.batch, job.length) == ("full", 4, 32)

    even = _device(oslo_models.estimate(config, "full", 2, 1, 4, 32))
    assert _planned(recipe, (even, even)).tensor == 2
    with pytest.raises(ValueError, match=r"per_device_train_batch_size=4 does not fit: .*; tensor_parallel_size=2"):
        _planned(recipe, (even, even), "--tensor_parallel_size", "1")
    with pytest.raises(ValueError, match=r"does not fit: .* would$"):
        _planned(recipe, (1000, 1000))


def test_divided_tokens_are_planned(tmp_path: Path, seed: int) -> None:
    """Devices that are too small for whole hidden states, and large enough for the tokens of each rank."""
    write_model(tmp_path, seed)
    recipe = write_recipe(tmp_path, "sft", seed, max_length=32)
    parsed = parse("sft", [str(recipe)])
    _, config = model_class(parsed)
    small = _device(oslo_models.estimate(config, "full", 2, 1, 4, 32, sequence_parallel=True))
    with pytest.raises(ValueError, match=r"per_device_train_batch_size=4 does not fit"):
        _planned(recipe, (small, small), "--tensor_parallel_size", "2")
    for size in ([], ["--tensor_parallel_size", "2"]):
        found = _planned(recipe, (small, small), "--sequence_parallel", "true", *size)
        assert found.tensor == 2 and found.sequence_parallel


def test_rows_divided_over_devices_are_planned(tmp_path: Path, seed: int) -> None:
    """A rank with half of the tokens fits on a device that is too small for all of them."""
    write_model(tmp_path, seed)
    recipe = write_recipe(tmp_path, "sft", seed, max_length=32)
    parsed = parse("sft", [str(recipe)])
    _, config = model_class(parsed)
    half = _device(oslo_models.estimate(config, "full", 1, 1, 4, 32, context_parallel_size=2))
    one = ("--tensor_parallel_size", "1")
    with pytest.raises(ValueError, match=r"per_device_train_batch_size=4 does not fit"):
        _planned(recipe, (half,), *one)
    for flags in ((), one):
        found = _planned(recipe, (half, half), "--context_parallel_size", "2", *flags)
        assert (found.tensor, found.context, found.replicas) == (1, 2, 1)
    assert _planned(recipe, (2 * half,) * 4, "--context_parallel_size", "2", *one).replicas == 2
