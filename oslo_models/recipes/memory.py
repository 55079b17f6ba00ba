"""Plans the memory of a recipe before its processes start: chooses sizes that fit, or says that none do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from oslo_models.planning.job import Job, positions
from oslo_models.planning.memory import GIB, estimate_job
from oslo_models.planning.sizes import FREE, Devices, choose_sizes, sizes_of
from oslo_models.recipes.parsing import Recipe
from oslo_models.recipes.sizes import Sizes
from oslo_models.starting import python_code

DEFAULT_LENGTH = 1024
ROWS_PER_SAMPLE = {"dpo": 2}
"""Rows of one sample: the chosen and the rejected answer."""
_READ = """\
import json, torch
print(json.dumps([torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]))
"""


def gpu_memory() -> Devices | None:
    """Return the free memory of the GPUs of this machine, or ``None`` without any.

    A short process reads it, since this one should hold no memory of a GPU.
    """
    done = subprocess.run(python_code(_READ), capture_output=True, text=True, check=False)
    sizes = json.loads(done.stdout.splitlines()[-1]) if not done.returncode and done.stdout else []
    return Devices(tuple(sizes)) if sizes else None


def job_of(recipe: Recipe, cls: Any, config: Any) -> Job:
    """Return a step of a recipe as a job on one device.

    Raises:
        ValueError: the step cannot be planned.
    """
    keys = vars(recipe.namespace)
    task = "full" if not keys["use_peft"] else "qlora" if keys["load_in_4bit"] or keys["load_in_8bit"] else "lora"
    length = min(keys.get("max_length") or DEFAULT_LENGTH, positions(config) or sys.maxsize)
    dtype = keys["dtype"] if keys["dtype"] not in (None, "auto") else config.dtype or "float32"
    return Job(
        cls,
        config,
        task,
        batch=keys["per_device_train_batch_size"] * ROWS_PER_SAMPLE.get(recipe.task, 1),
        length=length,
        micro_batch_size=keys.get("micro_batch_size") or 1,
        dtype=_dtype(dtype),
        lora_rank=keys["lora_r"],
        lora_targets=keys["lora_target_modules"],
        gradient_checkpointing=bool(keys["gradient_checkpointing"]),
    )


def _dtype(given: Any) -> Any:
    import torch

    return getattr(torch, given) if isinstance(given, str) else given


def plan_sizes(recipe: Recipe, sizes: Sizes, cls: Any, config: Any, devices: Devices) -> Sizes:
    """Return sizes whose ranks fit on the devices of this machine: the given ones, or chosen ones.

    A step that cannot be planned keeps its sizes, and one line on stderr says so.

    Raises:
        ValueError: the step does not fit. The message has the memory first, then sizes or keys that fit.
    """
    devices = Devices(devices.sizes[: sizes.devices])
    given = recipe.parallel
    try:
        job = job_of(recipe, cls, config)
        if sizes.sequence_parallel:  # one rank cannot divide tokens
            job = replace(job, tensor_parallel_size=sizes.tensor, sequence_parallel=True)
        is_given = given.tensor_parallel_size or given.tensor_parallel_shares or sizes.pipeline > 1 or sizes.expert > 1
        is_given = is_given or sizes.context > 1
        own = {**sizes.arguments, "schedule": vars(recipe.namespace).get("schedule", job.schedule)}
        found = estimate_job(replace(job, **own, data_parallel_size=sizes.replicas)) if is_given else None
        if found is not None and devices.fits(found):
            return sizes
        choice = choose_sizes(job, devices, stages=False)
    except (ValueError, ImportError, NotImplementedError) as error:
        print(f"the memory is not planned: {' '.join(str(error).split())}", file=sys.stderr)
        return sizes
    best = choice.estimate.job
    if choice.fits and not is_given:
        return replace(sizes, tensor=best.tensor_parallel_size, shares=tuple(best.tensor_parallel_shares or ()))
    found = found or choice.estimate
    remedy = f"devices of {found.largest.total / (1 - FREE) / GIB:.0f} GiB would"
    if choice.fits:
        remedy = f"{sizes_of(best)} would: the fullest rank takes {choice.estimate.largest.total / GIB:.1f} GiB"
    elif choice.keys:
        remedy = f"{choice.keys} would"
    rank, limit = devices.fullest(found)
    raise ValueError(
        f"per_device_train_batch_size={recipe.namespace.per_device_train_batch_size} does not fit: the fullest rank "
        f"takes {rank.total / GIB:.1f} GiB of {limit / GIB:.1f} usable GiB with {sizes_of(found.job)}; {remedy}"
    )
