"""Runs a recipe: checks it, starts its ranks, and trains on each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oslo_models.recipes.checks import (
    check_optimizer,
    check_training,
    check_values,
    gpu_count,
    model_class,
    reward_functions,
)
from oslo_models.recipes.joining import is_one_of_several, joined_world, torch_variables
from oslo_models.recipes.machines import find_meeting
from oslo_models.recipes.memory import gpu_memory, plan_sizes
from oslo_models.recipes.parsing import Recipe, build, parse
from oslo_models.recipes.record import check_record
from oslo_models.recipes.rows import load_rows
from oslo_models.recipes.sizes import Sizes, choose_sizes
from oslo_models.starting import import_path, python_module

WORKER = "oslo_models.recipes.worker"


def run(task: str, argv: Sequence[str]) -> None:
    """Check a recipe and train: on new processes, or on this one if a launcher has started it.

    A task of SLURM's `srun` becomes a rank by a new start with torch's variables, which libraries read.

    Raises:
        ValueError: the recipe has a mistake; nothing was started.
        OSError: a file of the recipe is missing; nothing was started.
        ImportError: a package is missing; nothing was started.
        RanksFailed: a rank failed.
        Interrupted: a signal ended the run.
    """
    if joined_world() is not None:
        run_rank(task, argv)
        return
    if is_one_of_several() and parse(task, argv).parallel.nnodes == 1:
        environment = {**os.environ, **torch_variables(), "PYTHONPATH": import_path()}
        command = python_module("oslo_models", task, *argv)
        os.execve(command[0], command, environment)
    recipe, sizes = check(task, argv)
    from oslo_models.recipes.launching import launch

    size = ["--tensor_parallel_size", str(sizes.tensor), "--devices", str(sizes.devices)]
    if sizes.shares:
        size += ["--tensor_parallel_shares", *map(str, sizes.shares)]
    launch(WORKER, [task, *argv, *size], sizes, recipe.parallel.rdzv_endpoint, output_folder(recipe))


def check(task: str, argv: Sequence[str]) -> tuple[Recipe, Sizes]:
    """Parse and check a recipe without starting processes.

    Raises:
        ValueError: the recipe has a mistake.
        OSError: a file is missing.
        ImportError: a package is missing.
    """
    recipe = parse(task, argv)
    check_values(recipe)
    if recipe.parallel.nnodes > 1 and recipe.parallel.rdzv_endpoint is not None:
        find_meeting(recipe.parallel.rdzv_endpoint)
    cls, config = model_class(recipe)
    sizes = choose_sizes(recipe.parallel, cls, config, gpus := gpu_count())
    build(recipe, for_checks=True)
    check_training(recipe)
    if task == "grpo":
        reward_functions(recipe)
    if task != "pretrain":
        load_rows(recipe)  # also fills the cache that the ranks read
    else:
        from oslo_models.recipes.pretraining import load_samples

        load_samples(recipe)
    if gpus and sizes.nnodes == 1 and (devices := gpu_memory()) is not None:
        sizes = plan_sizes(recipe, sizes, cls, config, devices)
    check_optimizer(recipe, sizes)
    check_record(recipe, sizes, output_folder(recipe))
    return recipe, sizes


def run_rank(task: str, argv: Sequence[str]) -> None:
    """Train on this rank of a running job."""
    from oslo_models.recipes.training import train

    recipe = parse(task, argv)
    check_values(recipe)
    cls, config = model_class(recipe)
    world = joined_world() or 1
    sizes = choose_sizes(replace(recipe.parallel, devices=world, nnodes=1), cls, config, gpus=0)
    train(recipe, sizes, cls)


def output_folder(recipe: Recipe) -> Path:
    """Return the output folder of a recipe."""
    return Path(recipe.namespace.output_dir or "trainer_output").expanduser()
