"""Checkpoints that hold in parts what is one tensor of the model, such as filters, or as one what are several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError

from support import zoo


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (torch.zeros(24, 1, 5), r"k_conv1d\.weight is a \(24, 1, 5\) .*q_conv1d\.weight a "),
        (None, r"k_conv1d\.weight is a .* of torch\.int32, and .*q_conv1d\.weight a .* of torch\.float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path, part: torch.Tensor | None, says: str) -> None:
    """Otherwise integers would be read as if they were filters."""
    zoo.original("OlmoHybridForCausalLM")(zoo.config("olmo_hybrid")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if key.endswith("k_conv1d.weight"))
    tensors[name] = tensors[name].int() if part is None else part
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=says):
        registry.find("OlmoHybridForCausalLM").from_pretrained_with_parallel(tmp_path)  # type: ignore[attr-defined]


def test_rows_that_are_no_equal_parts_are_refused_by_name(tmp_path: Path) -> None:
    zoo.original("HrmTextForCausalLM")(zoo.config("hrm_text")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if key.endswith("attn.gqkv_proj.weight"))
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gqkv_proj\.weight .* has 143 rows, and is 4 tensors .*self_attn\.gate"):
        registry.find("HrmTextForCausalLM").from_pretrained_with_parallel(tmp_path)  # type: ignore[attr-defined]
