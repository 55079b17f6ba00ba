"""TRL's supervised fine-tuning of a model with images on sharded models: losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="TRL's trainers need trl")
pytest.importorskip("datasets", reason="TRL's trainers need datasets")
pytest.importorskip("PIL", reason="images need pillow")

import trl
from datasets import Dataset
from PIL import Image
from transformers import LlavaForConditionalGeneration

from oslo_models import AutoModelForImageTextToText

from support import zoo
from support.pool import Pool
from support.processors import llava_processor
from support.trainers import SHORT, fresh_accelerate


def image_chats(count: int) -> list[dict[str, Any]]:
    """Return chats with an image each."""
    rows = []
    for number in range(count):
        pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        asked = [{"type": "image"}, {"type": "text", "text": f"w{7 + number} w8"}]
        told = [{"type": "text", "text": f"w{20 + number} w9 w10"}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        rows.append({"messages": messages, "images": [Image.fromarray(pixels.numpy())]})
    return rows


def losses(cls: Any, model: Any, folder: Path) -> list[float]:
    fresh_accelerate()
    options = {**SHORT, "max_steps": 3, "per_device_train_batch_size": 2, "seed": 1}
    args = trl.SFTConfig(str(folder), **options, bf16=False, gradient_checkpointing=False, max_length=None)
    dataset = Dataset.from_list(image_chats(8))
    trainer = cls(model=model, args=args, train_dataset=dataset, processing_class=llava_processor())
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def losses_on_ranks(checkpoint: Path, folder: Path) -> list[float]:
    from oslo_models.integrations import SFTTrainer

    return losses(SFTTrainer, AutoModelForImageTextToText.from_pretrained_with_parallel(checkpoint, 2), folder)


def test_supervised_fine_tuning_with_images_equals_one_process(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(zoo.config("llava"))
    model.save_pretrained(tmp_path / "model")
    expected = losses(trl.SFTTrainer, model, tmp_path / "one")
    assert len(expected) == 3
    for found in pool.run(2, losses_on_ranks, tmp_path / "model", tmp_path / "two", env=True):
        assert found == pytest.approx(expected, rel=1e-5)
