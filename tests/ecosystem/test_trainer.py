"""transformers' Trainer on sharded models: each step matches one process with the same total batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from oslo_models.integrations import Trainer

from support import pipelines, trainers, videos, zoo
from support.pool import Pool
from support.trainers import SIZES, Run

TRAINED = {"max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2}


def train(run: Run, tp: int, pp: int, args: dict[str, Any], rows: trainers.Rows, of_model: Any = None) -> list[str]:
    trainer = trainers.rank_trainer(run, tp, pp, args, rows, Trainer, of_model=of_model)
    return trainers.differences_of_run(trainer, run)


def image_rows(config: Any, seed: int, count: int) -> list[dict[str, Any]]:
    """Return rows with 1, 0 and 2 images in turn. The last row of each batch of four has none."""
    generator = torch.Generator().manual_seed(seed)
    side, rows = config.vision_config.image_size, []
    for number in range(count):
        ids = torch.randint(3, config.text_config.vocab_size - 3, (14,), generator=generator)
        images = 0 if number % 4 == 3 else (1, 0, 2)[number % 3]
        ids[2 : 2 + 4 * images] = config.image_token_id
        pixels = torch.randn(images, 3, side, side, generator=generator, dtype=torch.float64)
        labels = ids.masked_fill(ids == config.image_token_id, -100)
        rows.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pixels}
        )
    return rows


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "pixel_values"}
    pixels = torch.cat([row["pixel_values"] for row in rows])
    return {"pixel_values": pixels, **batch} if len(pixels) else batch


def train_with_images(run: Run, tp: int, pp: int, args: dict[str, Any], rows: Any, join: Any = collate) -> list[str]:
    trainer = trainers.rank_trainer(run, tp, pp, args, rows, Trainer, micro=1, data_collator=join)
    return trainers.differences_of_run(trainer, run)


@trainers.at_sizes("tp=2", "pp=2", "pp=2, dp=2")
def test_training_with_images_equals_one_process(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    """The last micro-batch has no image, so its tower is not used."""
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    config = zoo.config("llava")
    rows = image_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * replicas})
    name = "LlavaForConditionalGeneration"
    run = trainers.reference_run(name, config, seed, rows, total, transformers.Trainer, data_collator=collate)
    for lines in pool.run(ranks, train_with_images, run, tp, pp, args, rows, env=True):
        assert not lines, "\n".join(lines)


@trainers.at_sizes("tp=2", "pp=2", "pp=2, dp=2")
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava_onevision"])
def test_training_with_videos_equals_one_process(
    pool: Pool, model_type: str, sizes: str, tmp_path: Path, seed: int
) -> None:
    """A row in three has neither images nor videos.

    Rows have equally many labels: for types that do not accept the number of labels, `Trainer` averages the means of
    the replicas.
    """
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    name, config = videos.configured(model_type)
    batches = [videos.batch_of(model_type, name, config, seed + number) for number in range(14)]
    for batch in batches:
        batch["labels"][:, :28] = -100
    rows = [row for batch in batches for row in videos.rows_of(batch, config)][:40]
    args = {"output_dir": str(tmp_path), **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * replicas})
    run = trainers.reference_run(name, config, seed, rows, total, transformers.Trainer, data_collator=videos.collate)
    for lines in pool.run(ranks, train_with_images, run, tp, pp, args, rows, videos.collate, env=True):
        assert not lines, "\n".join(lines)


@pytest.mark.stacks
@trainers.at_sizes("tp=2", "pp=2", "dp=2", "tp=2, dp=2", "tp=2, pp=2")
def test_training_equals_one_process(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    """Losses, norms, learning rates, parameters; labels are averaged over replicas and accumulated batches."""
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    config = pipelines.config("gpt2")
    rows = trainers.text_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2, **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * replicas})
    run = trainers.reference_run("GPT2LMHeadModel", config, seed, rows, total, transformers.Trainer)
    for lines in pool.run(ranks, train, run, tp, pp, args, rows, env=True):
        assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("tp", "pp", "dp"),
    [
        *((1, 1, 1), (1, 2, 1)),
        *(pytest.param(*sizes, marks=pytest.mark.zoo) for sizes in ((1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 2, 1))),
    ],
)
def test_training_with_context_parallelism_equals_one_process(
    pool: Pool, tp: int, pp: int, dp: int, tmp_path: Path, seed: int
) -> None:
    """Ranks that divide tokens are one replica for samplers, numbers of labels, norms and operations."""
    config = pipelines.config("llama")
    rows = trainers.text_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2, **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * dp})
    run = trainers.reference_run("LlamaForCausalLM", config, seed, rows, total, transformers.Trainer)
    options = {"context_parallel_size": 2}
    for lines in pool.run(2 * tp * pp * dp, train, run, tp, pp, args, rows, options, env=True):
        assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("variant", "tp", "dp"),
    [("lfm2", 1, 1), *(pytest.param(*each, marks=pytest.mark.zoo) for each in (("qwen3_next", 1, 2), ("bamba", 2, 1)))],
)
def test_training_of_mixers_with_context_parallelism_equals_one_process(
    pool: Pool, variant: str, tp: int, dp: int, tmp_path: Path, seed: int
) -> None:
    """Ranks compute some of the channels of short convolutions, or of the heads of recurrences."""
    config = pipelines.config(variant)
    rows = trainers.text_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2, **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * dp})
    run = trainers.reference_run(zoo.lm_head(variant), config, seed, rows, total, transformers.Trainer)
    options = {"context_parallel_size": 2}
    for lines in pool.run(2 * tp * dp, train, run, tp, 1, args, rows, options, env=True):
        assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    ("tp", "dp", "ep"),
    [(1, 1, 2), *(pytest.param(*sizes, marks=pytest.mark.zoo) for sizes in ((2, 1, 2), (1, 2, 2), (1, 2, 4)))],
)
def test_training_of_experts_with_context_parallelism_equals_one_process(
    pool: Pool, tp: int, dp: int, ep: int, tmp_path: Path, seed: int
) -> None:
    config = pipelines.config("mixtral")
    rows = trainers.text_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2, **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * dp})
    run = trainers.reference_run("MixtralForCausalLM", config, seed, rows, total, transformers.Trainer)
    options = {"context_parallel_size": 2, "expert_parallel_size": ep, "experts_implementation": "eager"}
    for lines in pool.run(2 * tp * dp, train, run, tp, 1, args, rows, options, env=True):
        assert not lines, "\n".join(lines)


@trainers.at_sizes("tp=2, dp=2")
def test_training_with_parts_of_tokens_equals_one_process(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    """Sequence parallelism; replicas are wrapped in DistributedDataParallel."""
    tp, pp, ranks = SIZES[sizes]
    if tp == 1:
        pytest.skip("there is no tensor-parallel axis")
    config = pipelines.config("llama")
    rows = trainers.text_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2, **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * (ranks // (tp * pp))})
    run = trainers.reference_run("LlamaForCausalLM", config, seed, rows, total, transformers.Trainer)
    for lines in pool.run(ranks, train, run, tp, pp, args, rows, {"sequence_parallel": True}, env=True):
        assert not lines, "\n".join(lines)
