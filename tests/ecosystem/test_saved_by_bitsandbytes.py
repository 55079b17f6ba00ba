"""Checkpoints that transformers quantised with bitsandbytes and saved; they store `Conv1D` weights transposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel

from oslo_models import registry

from support.pool import Pool

pytestmark = pytest.mark.quantization


def _compare(directory: Path, expected: dict[str, Tensor], tp: int, pp: int) -> None:
    cls: Any = registry.find("GPT2LMHeadModel")
    model = cls.from_pretrained_with_parallel(directory, tp, pp, dequantize=True, dtype=torch.float32)
    names = {} if model.stage is None else model.stage.full_names
    for name, param in model.named_parameters(remove_duplicate=False):
        full = expected[names.get(name, name)]
        assert torch.equal(param.detach(), model.layouts[name].shard(full, model.mesh.tp.rank)), name


@pytest.mark.parametrize(
    "options",
    [
        dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
        dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
        dict(load_in_8bit=True),
    ],
    ids=["nf4", "fp4", "int8"],
)
def test_gpt2_saved_by_transformers(pool: Pool, tmp_path: Path, seed: int, options: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=64, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    settings = BitsAndBytesConfig(**options)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "plain", quantization_config=settings, dtype=torch.float32)
    model.save_pretrained(tmp_path / "quantised")
    again: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "quantised")
    plain: Any = again.dequantize(dtype=torch.float32)
    expected = {}
    for name, weight in plain.state_dict().items():
        is_conv = name.endswith("weight") and type(plain.get_submodule(name[:-7])) is torch.nn.Linear
        expected[name] = weight.float().T if is_conv and "lm_head" not in name else weight.float()
    for tp, pp in ((2, 1), (3, 1), (2, 2)):
        pool.run(tp * pp, _compare, tmp_path / "quantised", expected, tp, pp)
