"""Recipes with other rows, models and outputs: Parquet, chats, new models, fused modules, the picture and the card."""

from __future__ import annotations

import json
import re
import shlex
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="recipes are TRL's")

from oslo_models import LlamaForCausalLM

from support import pipelines, recipes
from support.pool import Pool
from support.reference import TOLERANCE
from support.trl_trainers import sentences, tiny_config, tiny_tokenizer


def run_counting_fused(task: str, argv: list[str]) -> int:
    """Train on this rank; return how often the model was fused."""
    calls: list[Any] = []
    fuse = LlamaForCausalLM.fuse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "fuse", lambda model: calls.append(model) or fuse(model))
        recipes.run_on_rank(task, argv)
    return len(calls)


def train(pool: Pool, folder: Path, task: str, recipe: Path) -> list[dict[str, float]]:
    """Train a recipe on two ranks. Return the logged numbers."""
    fused = pool.run(2, run_counting_fused, task, [str(recipe)], env=True)
    assert fused == [int("fuse: true" in recipe.read_text())] * 2
    return recipes.logged(folder / "out", 4)


def same_losses(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == 4
    for own, right in zip(found, expected, strict=True):
        assert abs(own["loss"] - right["loss"]) <= TOLERANCE * max(1.0, abs(right["loss"])), (own, right)


@pytest.mark.parametrize("rows", ["parquet", "messages", "fuse"])
def test_recipe_with_these_rows_trains_as_by_trl(
    rows: str, pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset, load_dataset

    monkeypatch.chdir(tmp_path)
    recipes.write_model(tmp_path, seed)
    written = sentences(tiny_config(), seed, 24, ("prompt", "completion"))
    keys: dict[str, Any] = {"fuse": True} if rows == "fuse" else {}
    file = tmp_path / ("rows.parquet" if rows == "parquet" else "rows.jsonl")
    if rows == "messages":
        (tmp_path / "model/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
        roles = ("prompt", "user"), ("completion", "assistant")
        written = [{"messages": [{"role": to, "content": row[key]} for key, to in roles]} for row in written]
    if rows == "parquet":
        Dataset.from_list(written).to_parquet(str(file))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in written))
    kind = "parquet" if rows == "parquet" else "json"
    recipe = recipes.write_recipe(tmp_path, "sft", seed, dataset_name=str(file))
    recipes.run_trl("sft", recipe, tmp_path / "trl", load_dataset(kind, data_files=str(file)))
    recipe = recipes.write_recipe(tmp_path, "sft", seed, dataset_name=str(file), **keys)
    same_losses(train(pool, tmp_path, "sft", recipe), recipes.logged(tmp_path / "trl", 4))
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "out/README.md").read_text()
    load, serve = (re.search(rf"^{name}: +(.*)$", card, re.M) for name in ("load", "serve"))
    assert load is not None and serve is not None
    python, flag, code = shlex.split(load[1])
    assert (python, flag) == ("python", "-c")
    exec(compile(code, "card", "exec"), {"print": lambda model: same_weights(model, tmp_path / "out")})
    program, *arguments = shlex.split(serve[1])
    assert program == "oslo-models" and arguments == ["serve", str(tmp_path / "out"), "--tensor-parallel-size", "2"]


@pytest.mark.parametrize("tokens", ["whole", pytest.param("divided", marks=pytest.mark.zoo)])
def test_recipe_with_experts_over_ranks(
    pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, tokens: str
) -> None:
    """`expert_parallel_size` gives each rank some of the experts as a whole. TRL adds the loss of the routers."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    config = pipelines.config("mixtral", vocab_size=37, eos_token_id=1, bos_token_id=2, pad_token_id=0)
    recipes.write_model(tmp_path, seed, "MixtralForCausalLM", config)
    tp, cp = (2, 1) if tokens == "whole" else (1, 2)
    sizes = {"tensor_parallel_size": tp, "context_parallel_size": cp, "expert_parallel_size": 2}
    recipe = recipes.write_recipe(tmp_path, "sft", seed, **sizes)
    splits = load_dataset("json", data_files=str(tmp_path / "sft.jsonl"))
    recipes.run_trl("sft", recipes.without_sizes(recipe), tmp_path / "trl", splits)
    same_losses(train(pool, tmp_path, "sft", recipe), recipes.logged(tmp_path / "trl", 4))
    found, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").state_dict() for name in ("out", "trl")
    )
    assert found.keys() == expected.keys()
    assert all((found[name] - tensor).abs().max() <= TOLERANCE for name, tensor in expected.items())


@pytest.mark.zoo
@pytest.mark.ray
def test_a_tracker_gets_the_losses(pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard stands for the trackers of transformers. One rank writes its file."""
    pytest.importorskip("tensorboardX", reason="it is installed beside Ray")
    monkeypatch.chdir(tmp_path)
    recipes.write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, "sft", seed, report_to="tensorboard")
    losses = [each["loss"] for each in train(pool, tmp_path, "sft", recipe)]
    (file,) = (tmp_path / "out").rglob("events.out.tfevents.*")
    assert scalars(file, "train/loss") == pytest.approx(losses, rel=1e-6)


def scalars(file: Path, name: str) -> list[float]:
    """Return the values of a tag in an event file of TensorBoard."""
    from tensorboardX.proto.event_pb2 import Event

    data, found, at = file.read_bytes(), [], 0
    while at < len(data):  # records: length, checksum, message, checksum
        (size,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found += [value.simple_value for value in event.summary.value if value.tag == name]
        at += size + 16
    return found


def same_weights(model: Any, folder: Path) -> None:
    saved = recipes.saved(folder)
    assert saved and all(torch.equal(model.state_dict()[name].to(saved[name].dtype), saved[name]) for name in saved)


def test_pretraining_of_a_new_model(pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are drawn by the seed, the same at other sizes, and the tokenizer is saved beside them."""
    monkeypatch.chdir(tmp_path)
    config = tiny_config()
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float64
    config.save_pretrained(tmp_path / "config")
    tiny_tokenizer(config.vocab_size).save_pretrained(tmp_path / "tokenizer")
    data = recipes.write_datasets(tmp_path, seed)
    keys = {"data": data, "max_length": 8, "config_name": str(tmp_path / "config")}
    keys |= {"tokenizer_name": str(tmp_path / "tokenizer"), "per_device_train_batch_size": 4}
    found = []
    for size in (2, 1):
        path = recipes.write_recipe(tmp_path, "pretrain", seed, **keys, tensor_parallel_size=size)
        text = path.read_text().replace(f"model_name_or_path: {tmp_path / 'model'}\n", "")
        path.write_text(text.replace(f"{tmp_path / 'out'}", f"{tmp_path}/out-{size}"))
        pool.run(size, recipes.run_on_rank, "pretrain", [str(path)], env=True)
        found.append(recipes.logged(tmp_path / f"out-{size}", 4))
    same_losses(*found)
    assert (tmp_path / "out-2/tokenizer.json").is_file() and (tmp_path / "out-2/loss.png").is_file()
