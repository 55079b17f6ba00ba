"""A tiny model, rows and recipes in TRL's published form, and runs of them by TRL and on ranks."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from support.reference import reference_model
from support.token_divisions import counting, is_divided
from support.trainers import fresh_accelerate, in_float64
from support.trl_trainers import NAME, exactly, sentences, tiny_config, tiny_tokenizer

COLUMNS = {"sft": ("prompt", "completion"), "dpo": ("prompt", "chosen", "rejected"), "grpo": ("prompt",)}
SHORT = {
    "dtype": "auto",
    "learning_rate": 1e-2,
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "save_steps": 2,
    "bf16": False,
    "gradient_checkpointing": False,  # recomputation would leave float64
    "use_cpu": True,
}


def write_model(folder: Path, seed: int, name: str = NAME, config: Any = None) -> None:
    """Save a tiny model, by default a Llama, in float64 with its tokenizer."""
    model = reference_model(name, config or tiny_config(), seed).double()
    model.config.dtype = torch.float64
    model.save_pretrained(folder / "model")
    tiny_tokenizer(model.config.vocab_size).save_pretrained(folder / "model")


def write_recipe(folder: Path, task: str, seed: int, **keys: Any) -> Path:
    """Write rows as JSON lines, and a recipe for them."""
    names = {"model_name_or_path": str(folder / "model")}
    if task != "pretrain":
        rows = sentences(tiny_config(), seed, 24, COLUMNS[task])
        names["dataset_name"] = str(folder / f"{task}.jsonl")
        Path(names["dataset_name"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump({**names, "output_dir": str(folder / "out"), **SHORT, **keys}))
    return path


def without_sizes(recipe: Path) -> Path:
    """Write a copy of a recipe without the keys that TRL lacks."""
    from oslo_models.recipes.keys import ParallelArguments

    keys = yaml.safe_load(recipe.read_text())
    path = recipe.with_stem(f"{recipe.stem}-trl")
    path.write_text(yaml.safe_dump({key: keys[key] for key in keys.keys() - vars(ParallelArguments()).keys()}))
    return path


def run_trl(task: str, recipe: Path, output: Path, splits: dict[str, Any]) -> None:
    """Train a recipe in this process by TRL's own command, in float64.

    Args:
        splits: the dataset by split, since TRL's command reads no files by their names.
    """
    import datasets
    import pytest

    fresh_accelerate()
    script = importlib.import_module(f"trl.scripts.{task}")
    parsed = script.make_parser().parse_args_and_config(["--config", str(recipe), "--output_dir", str(output)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *args, **options: splits)
        exactly(script.main, *parsed)
    fresh_accelerate()


def write_datasets(folder: Path, seed: int) -> list[str]:
    """Write two datasets as ``oslo-models preprocess`` does; return their names."""
    from oslo_models.data import DatasetPreprocessor

    names = [str(folder / "one"), str(folder / "two")]
    preprocessor = DatasetPreprocessor(tiny_tokenizer(tiny_config().vocab_size), num_workers=1)
    for number, name in enumerate(names):
        rows = sentences(tiny_config(), seed + number, 60, ("text",))
        preprocessor.preprocess([row["text"] for row in rows], name)
    return names


def train_by_transformers(folder: Path, keys: dict[str, Any]) -> None:
    """Train the model on a blend of datasets in this process with transformers' Trainer, in float64."""
    import transformers

    from oslo_models.data import DatasetBlender, DatasetForCausalLM

    fresh_accelerate()
    own = {"data", "data_weights", "max_length"}
    options = {key: value for key, value in {**SHORT, **keys}.items() if key not in {"dtype", *own}}
    args = transformers.TrainingArguments(str(folder / "plain"), report_to=[], **options)
    datasets = [DatasetForCausalLM(name, keys["max_length"], labels=True, seed=args.seed) for name in keys["data"]]
    transformers.set_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    blend = DatasetBlender(datasets, keys["data_weights"])
    collator = transformers.default_data_collator
    trainer = transformers.Trainer(model, args, data_collator=collator, train_dataset=blend)
    in_float64(trainer.train)
    trainer.save_model(str(folder / "plain"))
    fresh_accelerate()


def run_on_rank(task: str, argv: list[str]) -> None:
    """Train on this rank as ``oslo-models`` does where a launcher has started it, in float64."""
    from oslo_models.recipes.run import run

    fresh_accelerate()
    exactly(run, task, argv)


def divides_tokens(division: str, task: str, argv: list[str]) -> bool:
    """Train on this rank, and return whether the model divided its tokens."""
    with counting(division) as counts:
        run_on_rank(task, argv)
    return is_divided(counts)


def logged(output: Path, step: int) -> list[dict[str, float]]:
    state = json.loads((output / f"checkpoint-{step}/trainer_state.json").read_text())
    return list(state["log_history"])


def saved(output: Path) -> dict[str, Tensor]:
    """Return the weights of a model, or of an adapter."""
    adapter = output / "adapter_model.safetensors"
    return load_file(adapter if adapter.is_file() else output / "model.safetensors")
