"""``oslo-models sft --nnodes 2`` and ``serve`` over two hosts, and a host whose network fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="recipes are TRL's")

from support import ROOT, recipes
from support.hosts import Host, two_hosts
from support.pool import Pool
from support.trainers import fresh_accelerate
from support.waiting import wait_until

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
COMMAND = (sys.executable, "-c", "import sys; from oslo_models.cli.main import main; sys.exit(main())")
LIMIT = 600.0
TIMEOUT = 60.0
"""Seconds after which a silent rank is named."""


@pytest.mark.zoo
def test_recipe_over_two_hosts(pool: Pool, tmp_path: Path, seed: int) -> None:
    """Losses equal the losses on one host. When a host loses its network, each host names the other one and ends."""
    recipes.write_model(tmp_path, seed)
    keys = {"tensor_parallel_size": 2, "save_steps": 4}
    over_hosts = {"nnodes": 2, "rdzv_endpoint": "10.77.0.1:29400", "max_steps": 100_000}
    with two_hosts(tmp_path) as hosts:
        recipe = recipes.write_recipe(tmp_path, "sft", seed, **keys, **over_hosts, lr_scheduler_type="constant")
        processes = [host.start(tmp_path, ENVIRONMENT, *COMMAND, "sft", str(recipe)) for host in hosts]
        state = tmp_path / "out/checkpoint-4/trainer_state.json"
        wait_until(lambda: state.is_file() or any(each.poll() is not None for each in processes), LIMIT)
        assert state.is_file(), [shown(tmp_path, host) for host in hosts]
        found = recipes.logged(tmp_path / "out", 4)
        hosts[1].disconnect()
        for process, host, other in zip(processes, hosts, ("rank 1 (host two", "rank 0 (host one"), strict=True):
            assert process.wait(LIMIT) == 1
            text = shown(tmp_path, host)
            assert "failed: RankFailedError: " + other in text and "Traceback" not in text, text
            waited = re.search(r"waited ([0-9.]+) s", text)
            assert waited is not None and float(waited[1]) < TIMEOUT + 10, text
    recipe = recipes.write_recipe(
        tmp_path, "sft", seed, **keys, output_dir=str(tmp_path / "whole"), lr_scheduler_type="constant"
    )
    pool.run(2, run_plainly, [str(recipe)], env=True)
    expected = recipes.logged(tmp_path / "whole", 4)
    assert len(expected) == len(found) == 4
    for own, right in zip(found, expected, strict=True):
        assert own["loss"] == pytest.approx(right["loss"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)


@pytest.mark.zoo
def test_serving_over_two_hosts(tmp_path: Path, seed: int) -> None:
    """A model over two hosts answers as on one process. When a host loses its network, the server names it and ends."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    recipes.write_model(tmp_path, seed)
    (tmp_path / "secret").write_text("0123456789abcdef" * 4)
    model, tokenizer = (
        each.from_pretrained(tmp_path / "model", dtype="auto") for each in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer("w3 w4 w5", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    options = ("--tensor-parallel-size", "2", "--port", "8000", "--restart-workers", "0")
    serve = ("serve", str(tmp_path / "model"), *options, "--deploy-secret-file", str(tmp_path / "secret"))
    with two_hosts(tmp_path) as hosts:
        processes = []
        for number, host in enumerate(hosts):
            meeting = (f"--node-rank={number}", "--master-addr=one", "--master-port=29500")
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *meeting)
            processes.append(host.start(tmp_path, ENVIRONMENT, *torchrun, "-m", "oslo_models", *serve))

        def ask(seconds: int) -> subprocess.CompletedProcess[str]:
            prompt = {"model": str(tmp_path / "model"), "prompt": "w3 w4 w5"}
            body = json.dumps({**prompt, "max_tokens": 5, "temperature": 0})
            headers = {"Content-Type": "application/json"}
            code = (
                f"import urllib.request as r; q = r.Request('http://127.0.0.1:8000/v1/completions', {body.encode()!r}, "
                f"{headers}); print(r.urlopen(q, timeout={seconds}).read().decode())"
            )
            return subprocess.run(hosts[0].command(sys.executable, "-c", code), capture_output=True, text=True)

        begin, answer = time.monotonic(), ask(60)
        while re.search("refused|Error 503", answer.stderr) and time.monotonic() < begin + LIMIT:  # it loads
            time.sleep(1.0)
            answer = ask(60)
        assert answer.returncode == 0, (answer.stderr, [shown(tmp_path, host) for host in hosts])
        assert json.loads(answer.stdout)["choices"][0]["text"].split() == tokenizer.decode(expected).split()
        hosts[1].disconnect()
        answer = ask(300)
        assert answer.returncode and "HTTP Error 50" in answer.stderr, answer
        assert processes[0].wait(LIMIT) != 0
        assert "ranks [1] did not answer" in shown(tmp_path, hosts[0]), shown(tmp_path, hosts[0])


def run_plainly(argv: list[str]) -> None:
    """Train on this rank as a program would."""
    from oslo_models.recipes.run import run

    fresh_accelerate()
    run("sft", argv)


def shown(folder: Path, host: Host) -> str:
    return (folder / f"{host.name}.out").read_text() + (folder / f"{host.name}.err").read_text()
