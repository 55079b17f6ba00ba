"""A recipe joins the tasks of SLURM's `srun`. Processes with its variables stand for the tasks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="recipes are TRL's")

from oslo_models.recipes.joining import FIRST_PORT, PORTS, torch_variables

from support import ROOT, recipes
from support.pool import Pool
from support.trainers import fresh_accelerate

STEP = {
    **{"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"},
    **{"SLURM_LOCALID": "0", "SLURM_NODEID": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1(x2),1"},
    "SLURM_STEP_NODELIST": "gpu[007-008,12],big1",
}


def test_variables_of_a_task() -> None:
    expected = {"RANK": "4", "WORLD_SIZE": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "gpu007"}
    assert torch_variables(STEP) == {**expected, "MASTER_PORT": str(FIRST_PORT + 42)}
    assert torch_variables({**STEP, "MASTER_PORT": "7", "SLURM_NODEID": "0"}) == {
        **expected,
        **{"MASTER_PORT": "7", "LOCAL_WORLD_SIZE": "2"},
    }
    assert torch_variables({**STEP, "SLURM_STEP_NODELIST": "a-1,b[2-3]"})["MASTER_ADDR"] == "a-1"
    del (without := dict(STEP))["SLURM_STEP_NODELIST"]
    with pytest.raises(ValueError, match=r"SLURM_STEP_NUM_TASKS=5 without 'SLURM_STEP_NODELIST': set RANK, .*nnodes"):
        torch_variables(without)


def free_job() -> int:
    """Return the number of a job with a free port."""
    for job in range(os.getpid() % PORTS, PORTS):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", FIRST_PORT + job)):
                return job
    raise OSError("every port is taken")


def test_recipe_joins_the_tasks_of_srun(pool: Pool, tmp_path: Path, seed: int, warm_launchers: None) -> None:
    recipes.write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, "sft", seed, logging_steps=1)
    step = {**STEP, "SLURM_JOB_ID": str(free_job()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    step |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    step["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    code = "import sys; from oslo_models.cli.main import main; sys.exit(main())"
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", code, "sft", str(recipe)],
            cwd=tmp_path,
            env={**os.environ, **step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for task in range(2)
    ]
    outputs = [task.communicate(timeout=300) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    assert ["tensor_parallel_size=2" in out for out, _ in outputs] == [True, False]
    again = recipes.write_recipe(tmp_path, "sft", seed, output_dir=str(tmp_path / "whole"))
    pool.run(2, run_plainly, [str(again)], env=True)
    losses = [[each["loss"] for each in recipes.logged(tmp_path / name, 4)] for name in ("out", "whole")]
    assert len(losses[0]) == 4 and losses[0] == losses[1]


def run_plainly(argv: list[str]) -> None:
    """Train on this rank as a program would."""
    from oslo_models.recipes.run import run

    fresh_accelerate()
    run("sft", argv)
