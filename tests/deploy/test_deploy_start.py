"""Starting ``deploy=True`` from scripts, notebooks and launchers, and on Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import EngineError
from oslo_models.deploy import options as serving
from oslo_models.deploy.options import DeployOptions

from support import ROOT, deployment, faults
from support.deployment import Collected, prompt
from support.faults import gone
from support.pool import Pool
from support.ports import short_path

SCRIPT = """
import sys, torch
from oslo_models import GPT2LMHeadModel
print("began", flush=True)
model = GPT2LMHeadModel.from_pretrained_with_parallel({checkpoint!r}, tensor_parallel_size=2, deploy=True)
print(*model._engine.pids, flush=True)
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3).shape[1], flush=True)
"""


def test_deployment_starts_from_a_script_without_a_main_guard(stand: faults.Stand, warm: None) -> None:
    """Even from standard input and with a full disk for its log, it runs once, and its workers end with it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    with open("/dev/full", "w") as full:
        script = subprocess.run(
            [sys.executable, "-"],
            input=SCRIPT.format(checkpoint=str(stand.checkpoint)),
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env=environment,
            timeout=120,
        )
    began, pids, length = script.stdout.splitlines()
    assert (began, length, script.returncode) == ("began", "6", 0)
    assert len(pids.split()) == 2 and gone([int(pid) for pid in pids.split()])


CELLS = """
from oslo_models import GPT2LMHeadModel
model = GPT2LMHeadModel.from_config_with_parallel(config, deploy=True, verbose="simple")

model.generate(batch["input_ids"], max_new_tokens=3, min_new_tokens=3)
"""


def test_deployment_starts_inside_an_event_loop_and_ends_with_the_model(
    stand: faults.Stand, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells run inside of an event loop; a deleted model ends its workers."""
    names: dict[str, Any] = {"__name__": "__main__", "config": deployment.CONFIG, "batch": prompt(seed)}

    async def run() -> None:
        for number, cell in enumerate(CELLS.split("\n\n")):
            exec(compile(cell, f"<cell {number}>", "exec"), names)

    asyncio.run(run())
    assert capsys.readouterr().out.startswith("cpu:0: ")
    pids = names["model"]._engine.pids
    plain = names["model"].cpu()
    assert gone(pids) and type(plain) is GPT2LMHeadModel and plain.lm_head.weight.shape == (101, 48)
    with pytest.raises(RuntimeError, match="device"):
        names["model"].to("nowhere")
    names["model"].restart()
    pids = names["model"]._engine.pids
    names.clear()
    gc.collect()
    assert gone(pids)


def test_fused_pipeline_stages_are_deployed_and_restarted(stand: faults.Stand, seed: int, tmp_path: Path) -> None:
    """Two fused stages give the same answers, errors and restarts as one."""
    stand.model.save_pretrained_with_parallel(tmp_path)  # split files of other parallel sizes
    sizes = {"pipeline_parallel_size": 2, "deploy": True}
    batch = prompt(seed)
    with GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path, **sizes).fuse() as model:
        expected = stand.whole.generate(**batch, max_new_tokens=8, do_sample=False)
        logits = stand.whole(**batch).logits.detach()
        for _ in range(2):
            assert "yes" in str(model.fusion_report())
            assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
            torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-4, atol=1e-4)
            bad = torch.tensor([[5, 500]])
            for call in (model, lambda ids: model.generate(ids, max_new_tokens=2)):
                with pytest.raises(IndexError):
                    call(bad)
            with pytest.raises(ValueError, match="GPT2MLP"):
                model.fuse([torch.nn.Linear])
            with pytest.raises(IndexError):  # an error of one stage, after 500 tokens
                model.generate(**prompt(seed, 1, 510), max_new_tokens=9, min_new_tokens=9)
            assert model.health()["healthy"]
            model.restart()


def test_deployment_under_torchrun_runs_the_script_on_rank_0(pool: Pool, stand: faults.Stand, seed: int) -> None:
    """Rank 0 is the application; the other process serves until the application ends."""
    batch = prompt(seed)
    (first, error, second, length, refusal, pids), code = pool.run(
        2, deployment.launched_script, deployment.server_address(), stand.checkpoint, batch, env=True
    )
    expected = stand.whole.generate(**batch, max_new_tokens=5, do_sample=False)
    assert torch.equal(first, expected) and torch.equal(second, expected) and length == 9
    assert "rank 1 (pid " in error and "was killed by SIGKILL" in error
    assert "one of several processes" in refusal
    assert code == 0 and gone(pids)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"deploy": True, "deployment": False}, "deploy=True and deployment=False are the same argument"),
        ({"deploy": None, "deployment": "no"}, "deployment must be True, False or None, got 'no'"),
        ({"deploy": "no"}, "deploy must be True, False or None, got 'no'"),
        ({"max_batch_length": 0}, "max_batch_length must be"),
        ({"deploy_backend": "smoke signals"}, "deploy_backend='smoke signals' is none of 'auto', 'process', 'ray'"),
        ({"deploy_backend": "torchrun"}, "`torchrun --nproc-per-node=1 app.py`"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer of at least 1, got 0"),
        ({"prefill_chunk_size": 2.5}, "prefill_chunk_size must be"),
        ({"threads_per_worker": 0}, "threads_per_worker must be an integer of at least 1, got 0"),
        ({"verbose": "very"}, "verbose must be None, 'simple' or 'detail', got 'very'"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 is more than num_attention_heads=4"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1, got 0"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    kwargs: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ProcessExecutor", None)
    with pytest.raises(ValueError, match=re.escape(text)):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, **{"deploy": True, **kwargs})


def test_threads_of_workers() -> None:
    assert DeployOptions(threads_per_worker=3).threads(2) == 3
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        assert DeployOptions().threads(2) == 2 and DeployOptions().threads(9) == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("backend", "ranks", "text"),
    [
        ("process", 2, "would serve one model in each of the 2 processes"),
        ("auto", 4, "is more than the 2 processes that the launcher started"),
    ],
)
def test_deploy_backend_must_match_the_launcher(
    monkeypatch: pytest.MonkeyPatch, backend: str, ranks: int, text: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = {"tensor_parallel_size": ranks, "deploy_backend": backend}
    with pytest.raises(ValueError, match=text):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, deploy=True, **sizes)


@pytest.mark.parametrize(
    ("devices", "ray", "launched", "backend"),
    [
        (0, False, False, "process"),
        (2, False, False, "process"),
        (1, True, False, "ray"),
        (2, True, False, "process"),
        (1, True, True, "torchrun"),
    ],
)
def test_deploy_backend_is_chosen_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, devices: int, ray: bool, launched: bool, backend: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: ray, __spec__=object()))
    if launched:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert serving.DeployOptions().backend(2) == backend


def test_deployment_needs_one_gpu_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"more than the 1 GPUs.*`torchrun --nnodes=.*oslo-models\[ray\]"):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, tensor_parallel_size=2, deploy=True)


@pytest.mark.zoo
@pytest.mark.ray
def test_deployment_on_ray_actors(stand: faults.Stand, seed: int) -> None:
    """Use two Ray actors on this host, and kill one."""
    ray = pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray-") as long, short_path(long) as folder:  # the folder holds sockets
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, _node_ip_address="127.0.0.1")
        try:
            sizes = {"tensor_parallel_size": 2, "deploy": True, "deploy_backend": "ray"}
            model = GPT2LMHeadModel.from_pretrained_with_parallel(stand.checkpoint, **sizes)
            batch, pids = prompt(seed), model._engine.pids
            expected = stand.whole.generate(**batch, max_new_tokens=8, do_sample=False)
            assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
            streamer = Collected()
            model.generate(**prompt(seed, 1), max_new_tokens=3, min_new_tokens=3, streamer=streamer)
            assert len(streamer.tokens) == 10 and streamer.ended
            with pytest.raises(ValueError, match="max_new_tokns"):
                model.generate(**batch, max_new_tokns=3)
            threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
            slow = {"logits_processor": [deployment.Trouble("sleep", 0)]}
            with pytest.raises(EngineError, match=rf"rank 1 \(pid {pids[1]}, an actor of Ray\) died: The actor died"):
                model.generate(**batch, **deployment.LONG, **slow)
            assert gone(pids)
            model.restart()
            assert torch.equal(model.generate(**batch, max_new_tokens=8, do_sample=False), expected)
            pids = model._engine.pids
            model.close()
            assert gone(pids)
        finally:
            ray.shutdown()


def test_restart_waits_until_the_workers_before_have_ended(
    stand: faults.Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread ends the workers and removes their directory, while this thread starts new workers."""
    stand.answers()
    executor = stand.model._engine._executor
    kill, before = executor.kill, stand.pids

    def slow() -> None:
        time.sleep(0.5)
        kill()

    monkeypatch.setattr(executor, "kill", slow)
    os.kill(before[0], signal.SIGKILL)
    while stand.model._engine._executor is not None:
        time.sleep(0.001)
    stand.model.restart()
    assert gone(before, 0.0)
    stand.answers()
