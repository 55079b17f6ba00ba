"""Joins processes that run: of torchrun and Ray by torch's environment variables, of `srun` by SLURM's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import chain, repeat

FIRST_PORT, PORTS = 15_000, 15_000
"""Ports below those that Linux gives to outgoing connections."""


def joined_world(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of processes if a launcher has set torch's variables; ``None`` otherwise."""
    return int(environment["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= environment.keys() else None


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `srun` has started this process as one of several tasks of a step."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def torch_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return torch's variables for a task of `srun`. Given ones win.

    The first machine of the step is the master. The port follows from the job and the step, so that jobs that share a
    machine rarely meet; ``MASTER_PORT`` replaces it.

    Raises:
        ValueError: a variable of SLURM is missing.
    """
    try:
        tasks, machine = environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"])
        number = int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
        found = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_per_machine(tasks)[machine]),
            "MASTER_ADDR": _first_machine(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(FIRST_PORT + number % PORTS),
        }
    except KeyError as error:
        raise ValueError(
            f"SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']} without {error}: set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start one process on each machine, with nnodes and "
            "rdzv_endpoint"
        ) from error
    return found | {name: environment[name] for name in found if name in environment}


def _per_machine(text: str) -> list[int]:
    """Return the tasks of each machine. SLURM writes ``2(x3),1`` for 2, 2, 2 and 1."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return list(chain.from_iterable(repeat(int(count), int(times or 1)) for count, times in groups))


def _first_machine(text: str) -> str:
    """Return the first of a list of machines. SLURM writes ``gpu[03-05,9],cpu1`` for gpu03, gpu04, gpu05, ..."""
    first = re.split(r",(?![^\[]*\])", text)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
