"""Recipes of TRL on two ranks: results of TRL's own command, and runs that are killed, interrupted and continued."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="recipes are TRL's")

from support import ROOT, recipes
from support.pool import Pool
from support.reference import TOLERANCE
from support.token_divisions import CONTEXT, SEQUENCE, sizes_of
from support.trl_trainers import OF_LOGITS
from support.waiting import wait_until

LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.0}
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "dpo": ("dpo", {"beta": 0.5}),
    "sft, LoRA": ("sft", LORA),
    "sft, stages": ("sft", {"pipeline_parallel_size": 2, "micro_batch_size": 2}),
    "sft, LoRA on stages": ("sft", {**LORA, "pipeline_parallel_size": 2, "micro_batch_size": 2}),
    "sft, packed": ("sft", {"packing": True, "packing_strategy": "wrapped", "max_length": 8}),
    "grpo": ("grpo", {"reward_funcs": ["own_rewards.unlike"], "max_completion_length": 4, "num_generations": 4}),
}


@pytest.mark.parametrize(
    "case", [each if each in ("sft", "dpo") else pytest.param(each, marks=pytest.mark.zoo) for each in RECIPES]
)
def test_recipe_trains_as_by_trl(case: str, pool: Pool, tmp_path: Path, seed: int, monkeypatch: Any) -> None:
    """Losses, all other logged numbers and the saved weights equal the results of TRL's command on one process."""
    from datasets import load_dataset

    task, keys = RECIPES[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # TRL's command adds the working directory
    (tmp_path / "own_rewards.py").write_text("from support.trl_trainers import unlike_words as unlike\n")
    recipes.write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, task, seed, **keys)
    splits = load_dataset("json", data_files=str(tmp_path / f"{task}.jsonl"))
    plain = recipes.without_sizes(recipe)
    recipes.run_trl(task, plain, tmp_path / "trl", splits)
    pool.run(2, recipes.run_on_rank, task, [str(recipe)], env=True)
    expected, found = recipes.logged(tmp_path / "trl", 4), recipes.logged(tmp_path / "out", 4)
    left_out = set(OF_LOGITS) if "stages" in case else set()
    assert len(expected) == 4 and [each.keys() for each in found] == [each.keys() - left_out for each in expected]
    for own, right in zip(found, expected, strict=True):
        for key in own.keys() - {"step_time"}:
            assert abs(own[key] - right[key]) <= TOLERANCE * max(1.0, abs(right[key])), (key, own, right)
    assert_equal(recipes.saved(tmp_path / "out"), recipes.saved(tmp_path / "trl"), TOLERANCE)
    card = (tmp_path / "out/README.md").read_text()
    size = "pipeline_parallel_size: 2" if "stages" in case else "tensor_parallel_size: 2"
    assert "## Recipe" in card and size in card and "oslo-models serve" in card


def test_merged_adapter_is_saved(pool: Pool, tmp_path: Path, seed: int, monkeypatch: Any) -> None:
    """The merged model equals the saved adapter merged by peft on one process. The commands name it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    recipes.write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, "sft", seed, **{**LORA, "merge_adapter": True, "max_steps": 1})
    pool.run(2, recipes.run_on_rank, "sft", [str(recipe)], env=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected = PeftModel.from_pretrained(plain, tmp_path / "out", autocast_adapter_dtype=False).merge_and_unload()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out/merged", dtype="auto").state_dict()
    assert_equal(found, dict(expected.state_dict()), TOLERANCE)
    changed = "model.layers.0.mlp.down_proj.weight"
    assert (found[changed] - before[changed]).abs().max() > 1e3 * TOLERANCE
    assert "serve: oslo-models serve out/merged" in (tmp_path / "out/README.md").read_text().replace(f"{tmp_path}/", "")
    assert (tmp_path / "out/merged/tokenizer.json").is_file()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert (found[name] - tensor).abs().max() <= tolerance, name


def test_killed_interrupted_and_continued(pool: Pool, tmp_path: Path, seed: int, warm_launchers: None) -> None:
    """A killed rank is named once. Ctrl-C ends all ranks. The same command then continues to the same weights."""
    steps = 40
    recipes.write_model(tmp_path, seed)
    keys = {"max_steps": steps, "tensor_parallel_size": 2, "gradient_accumulation_steps": 1, "save_total_limit": 3}
    recipe = recipes.write_recipe(tmp_path, "sft", seed, **keys)

    def saved_steps() -> list[int]:
        states = (tmp_path / "out").glob("checkpoint-*/trainer_state.json")
        return sorted(int(each.parent.name.rpartition("-")[2]) for each in states)

    process = start(recipe)
    wait_until(lambda: saved_steps() or process.poll() is not None)
    killed = second_rank(process)
    os.kill(killed, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    assert err.count(f"(pid {killed}) was ended by SIGKILL") == err.count("rank 1 on") == 1, err
    assert "Traceback" not in err and "from the start" in out and saved_steps()[-1] < steps

    process, before = start(recipe), saved_steps()[-1]
    wait_until(lambda: saved_steps()[-1] > before or process.poll() is not None)
    ranks, began = children_of(process), time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "ended by SIGINT; the same command continues" in err, err
    assert "Traceback" not in err and re.search(rf"continues from \S*checkpoint-{before}\b", out)
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in ranks), began + 30 - time.monotonic())

    process = start(recipe)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "oslo-models serve" in out and "A.from_pretrained" in out and f"{steps}/{steps}" in err
    shown = r"\d+/40 \[\d\d:\d\d<\d\d:\d\d, .*loss=[\d.]+, memory=[\d.]+ GiB, tokens/s=\d+"
    assert re.search(shown, err), err
    assert len(list((tmp_path / "out").glob("rank-logs-*"))) == 1, "only the failed run keeps the output of its ranks"
    again = recipes.write_recipe(tmp_path, "sft", seed, **{**keys, "output_dir": str(tmp_path / "whole")})
    pool.run(2, run_plainly, [str(again)], env=True)
    assert_equal(recipes.saved(tmp_path / "out"), recipes.saved(tmp_path / "whole"), 0.0)


def test_ranks_end_with_a_killed_launcher(tmp_path: Path, seed: int, warm_launchers: None) -> None:
    """Otherwise they would write to the output folder of the same command, started again."""
    recipes.write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, "sft", seed, max_steps=10_000, tensor_parallel_size=2, save_total_limit=2)
    process = start(recipe)
    wait_until(lambda: list(tmp_path.glob("out/checkpoint-*")) or process.poll() is not None)
    ranks = children_of(process)
    process.kill()
    process.communicate(timeout=120)
    assert len(ranks) >= 2
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in ranks), 30)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "schedule": "zb-h1"},
    ],
    ids=["tp=2", "pp=2", "zb-h1"],
)
def test_pretraining_equals_transformers(
    sizes: dict[str, Any], pool: Pool, tmp_path: Path, seed: int, monkeypatch: Any
) -> None:
    """A checkpoint trains on a blend of two datasets as by transformers' Trainer on one process."""
    monkeypatch.chdir(tmp_path)
    recipes.write_model(tmp_path, seed)
    data = recipes.write_datasets(tmp_path, seed)
    keys = {"data": data, "data_weights": [0.7, 0.3], "max_length": 8, "max_grad_norm": 0.5}
    recipe = recipes.write_recipe(tmp_path, "pretrain", seed, **keys, **sizes, micro_batch_size=2)
    recipes.train_by_transformers(tmp_path, keys)
    pool.run(2, recipes.run_on_rank, "pretrain", [str(recipe)], env=True)
    expected, found = recipes.logged(tmp_path / "plain", 4), recipes.logged(tmp_path / "out", 4)
    for own, right in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert abs(own[key] - right[key]) <= TOLERANCE * max(1.0, abs(right[key])), (key, own, right)
    assert_equal(recipes.saved(tmp_path / "out"), recipes.saved(tmp_path / "plain"), TOLERANCE)


DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: RECIPES[name] for name in ("sft", "dpo", "grpo", "sft, LoRA", "sft, packed")},
    "sft, checkpointing": ("sft", {"gradient_checkpointing": True, "dtype": "float32", "optim": "sgd"}),
    "pretrain": ("pretrain", {"max_length": 9}),
    "sft, stages": ("sft", {"pipeline_parallel_size": 2, "micro_batch_size": 1}),
    "pretrain, stages": ("pretrain", {"max_length": 9, "pipeline_parallel_size": 2, "micro_batch_size": 2}),
}


@pytest.mark.parametrize("division", [SEQUENCE, CONTEXT])
@pytest.mark.parametrize(
    "case", [each if each in ("sft", "pretrain") else pytest.param(each, marks=pytest.mark.zoo) for each in DIVIDED]
)
def test_divided_tokens_do_not_change_a_recipe(
    case: str, division: str, pool: Pool, tmp_path: Path, seed: int, monkeypatch: Any
) -> None:
    """Losses, gradient norms and saved weights equal a run on as many ranks with whole hidden states."""
    task, keys = DIVIDED[case]
    ranks = 2 * keys.get("pipeline_parallel_size", 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rewards.py").write_text("from support.trl_trainers import unlike_words as unlike\n")
    recipes.write_model(tmp_path, seed)
    if task == "pretrain":
        keys = {**keys, "data": recipes.write_datasets(tmp_path, seed)}
    folders = {divides: tmp_path / f"divided-{divides}".lower() for divides in (False, True)}
    for divides, folder in folders.items():
        sizes = sizes_of(division, 2) if divides else {"tensor_parallel_size": 2}
        recipe = recipes.write_recipe(tmp_path, task, seed, **keys, **sizes, output_dir=str(folder))
        assert pool.run(ranks, recipes.divides_tokens, division, task, [str(recipe)], env=True) == [divides] * ranks
    tolerance = 1e-5 if "checkpointing" in case else TOLERANCE  # recomputation would leave float64
    expected, found = (recipes.logged(folder, 4) for folder in folders.values())
    assert len(expected) == len(found) == 4
    for own, right in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm"):
            assert abs(own[key] - right[key]) <= tolerance * max(1.0, abs(right[key])), (key, own, right)
    saved = [recipes.saved(folder) for folder in folders.values()]
    assert_equal(saved[1], saved[0], tolerance)
    assert f"{division}: {'true' if division == SEQUENCE else 2}" in (folders[True] / "README.md").read_text()


def test_first_failure_is_named() -> None:
    """Ranks that lost their connection, or that the launcher has ended, are not the cause."""
    launching = pytest.importorskip("oslo_models.recipes.launching")

    def failure(rank: int, exitcode: int, message: str, timestamp: int) -> Any:
        made = launching.ProcessFailure(rank, 100 + rank, exitcode, "no file")
        made.message, made.timestamp = message, timestamp
        return rank, made

    lost = failure(0, 1, "RankFailedError: rank 1 died", 1)
    ended = failure(2, -signal.SIGTERM, "Signal 15 (SIGTERM) received by PID 102", 1)
    own = failure(1, 1, "ValueError: too long", 3)
    killed = failure(3, -signal.SIGKILL, "Signal 9 (SIGKILL) received by PID 103", 5)
    assert launching._root_cause(dict([lost, ended, own])) == own
    assert launching._root_cause(dict([ended, lost, own, killed])) == killed
    assert launching._root_cause(dict([ended, lost])) == lost
    assert re.fullmatch(r"rank 1 on \S+ \(pid 101\) failed: ValueError: too long", launching._describe(*own))
    assert "rank 3 on" in (text := launching._describe(*killed)) and "SIGKILL; the system may have run out" in text


def run_plainly(argv: list[str]) -> None:
    """Train on this rank as a program would."""
    from oslo_models.recipes.run import run

    from support.trainers import fresh_accelerate

    fresh_accelerate()
    run("sft", argv)


def start(recipe: Path) -> subprocess.Popen[str]:
    """Start `oslo-models sft` in the folder of a recipe."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from oslo_models.cli.main import main; sys.exit(main())",
            "sft",
            str(recipe),
        ],
        cwd=recipe.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def children_of(launcher: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the ranks that a launcher has started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == launcher.pid:
                found.append(int(file.parent.name))
    return found


def second_rank(launcher: subprocess.Popen[str]) -> int:
    """Return the process id of rank 1, which writes to a file."""
    return next(each for each in children_of(launcher) if os.readlink(f"/proc/{each}/fd/1").endswith("/1/stdout.log"))
