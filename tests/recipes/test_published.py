"""The recipes that TRL's documentation publishes for `trl sft` and `trl dpo` run unchanged, with TRL's losses.

Folders in the working directory stand for the model and the datasets on the hub. Flags, the same for both programs,
choose float64 and few steps. Source: TRL, "Command Line Interfaces", and its example configuration of `trl sft`.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="recipes are TRL's")

from support import recipes
from support.doc_pages import inside
from support.pool import Pool
from support.reference import TOLERANCE
from support.trainers import fresh_accelerate
from support.trl_trainers import exactly, sentences, tiny_config

yaml = pytest.importorskip("yaml")
MODEL = "Qwen/Qwen2.5-0.5B"
PUBLISHED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "sft": ("sft", {"dataset_name": "stanfordnlp/imdb"}, ("text",)),
    "sft, example": (
        "sft",
        {
            **{"dataset_name": "stanfordnlp/imdb", "report_to": "none"},
            **{"learning_rate": 0.0001, "lr_scheduler_type": "cosine"},
        },
        ("text",),
    ),
    "dpo": ("dpo", {"dataset_name": "anthropic/hh-rlhf"}, ("prompt", "chosen", "rejected")),
}
"""The command, keys beside the model, and columns of the stand-in for the dataset."""
FLAGS = ("--dtype", "auto", "--bf16", "false", "--gradient_checkpointing", "false", "--use_cpu", "true")
STEPS = ("--max_steps", "4", "--save_steps", "4", "--logging_steps", "1", "--per_device_train_batch_size", "4")


def write_stand_ins(folder: Path, dataset: str, columns: tuple[str, ...], seed: int) -> None:
    recipes.write_model(folder, seed)
    (folder / MODEL).parent.mkdir()
    (folder / "model").rename(folder / MODEL)
    rows = sentences(tiny_config(), seed, 24, columns)
    if "prompt" in columns:  # the dataset repeats the prompt in both answers
        rows = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]
    (folder / dataset).mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / dataset / "train.jsonl").write_text(text)


def run_in(folder: Path, task: str, argv: list[str]) -> None:
    with inside(folder):
        recipes.run_on_rank(task, argv)


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_recipe_runs_unchanged(
    case: str, pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, keys, columns = PUBLISHED[case]
    monkeypatch.chdir(tmp_path)
    write_stand_ins(tmp_path, keys["dataset_name"], columns, seed)
    recipe = tmp_path / f"{task}_config.yaml"
    recipe.write_text(yaml.safe_dump({"model_name_or_path": MODEL, **keys}, sort_keys=False))

    fresh_accelerate()
    script = importlib.import_module(f"trl.scripts.{task}")
    flags = ["--config", str(recipe), *FLAGS, *STEPS, "--output_dir", str(tmp_path / "trl")]
    exactly(script.main, *script.make_parser().parse_args_and_config(flags))
    fresh_accelerate()
    argv = [str(recipe), *FLAGS, *STEPS, "--output_dir", str(tmp_path / "out")]
    pool.run(2, run_in, tmp_path, task, argv, env=True)

    expected, found = recipes.logged(tmp_path / "trl", 4), recipes.logged(tmp_path / "out", 4)
    assert len(found) == len(expected) == 4
    for own, right in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm", "learning_rate"):
            assert abs(own[key] - right[key]) <= TOLERANCE * max(1.0, abs(right[key])), (key, own, right)
    saved, trl = recipes.saved(tmp_path / "out"), recipes.saved(tmp_path / "trl")
    assert saved.keys() == trl.keys() and all(tensor.dtype == torch.float64 for tensor in saved.values())
    assert all((saved[name] - tensor).abs().max() <= TOLERANCE for name, tensor in trl.items())
