"""QLoRA: plain ``peft`` over sharded quantised weights trains and saves adapters as over those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from support import qlora, quantized
from support.pool import Pool

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.quantization


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "target_modules": "all-linear", **changes})


def write_plain(directory: Path, seed: int, **sizes: int) -> None:
    torch.manual_seed(seed)
    LlamaForCausalLM(quantized.llama_config(**sizes)).save_pretrained(directory)


TORCHAO = {
    "int8": lambda ao: ao.Int8WeightOnlyConfig(),
    "int4-groups": lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16)),
}


@pytest.mark.parametrize("kind", TORCHAO)
def test_over_torchao(pool: Pool, tmp_path: Path, seed: int, kind: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    config = transformers.TorchAoConfig(TORCHAO[kind](ao))
    write_plain(tmp_path, seed, hidden_size=96, head_dim=16, intermediate_size=192)
    base = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    run = qlora.reference_run(tmp_path, base, lora(), seed, quantization_config=config)
    for tp, pp in ((2, 1), (3, 1), (1, 2), (2, 2)):
        pool.run(tp * pp, qlora.train_on_ranks, run, tp, pp, 1e-5)


BITSANDBYTES = {
    "nf4-double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_quant_storage="bfloat16"),
    "int8": dict(load_in_8bit=True),
}
BLOCKS = dict(hidden_size=192, head_dim=32, intermediate_size=384)
"""Sizes at which rows are whole blocks of 64; two ranks share one of the middle of each row of ``o_proj``."""


def over_bitsandbytes(directory: Path, seed: int, kind: str) -> Any:
    """Train over weights that bitsandbytes has quantised."""
    functional = pytest.importorskip("bitsandbytes.functional")
    config = transformers.BitsAndBytesConfig(**BITSANDBYTES[kind])
    write_plain(directory, seed, **BLOCKS)
    base: Any = LlamaForCausalLM.from_pretrained(directory, quantization_config=config)
    weights, held = {}, {}
    for name, param in base.named_parameters():
        if not quantized.is_quantized(name):
            continue
        if config.load_in_4bit:
            weights[name] = functional.dequantize_4bit(param.data, param.quant_state)
            parts = [part for part in param.quant_state.as_dict(packed=True).values() if torch.is_tensor(part)]
            held[name] = param.nbytes + sum(part.nbytes for part in parts)
        else:
            weights[name] = functional.int8_vectorwise_dequant(param.data, param.SCB)
            held[name] = param.nbytes + param.SCB.nbytes
    base.save_pretrained(directory / "quantised")
    run = qlora.reference_run(directory, base, lora(), seed, quantization_config=config)
    run.dequantized, run.bytes_held = weights, held
    return run


@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_over_bitsandbytes(pool: Pool, tmp_path: Path, seed: int, kind: str) -> None:
    """As they are loaded, and from a checkpoint of quantised weights."""
    run = over_bitsandbytes(tmp_path, seed, kind)
    # On one process, bitsandbytes also quantises outliers of activations to 8 bits, and here they stay as they are.
    tolerance = 1e-5 if kind != "int8" else 3e-2
    for tp, pp in ((2, 1), (3, 1), (1, 2), (2, 2)):
        pool.run(tp * pp, qlora.train_on_ranks, run, tp, pp, tolerance)
    run.directory, run.options = tmp_path / "quantised", {}
    (tmp_path / "adapter").rename(run.saved)
    for tp, pp in ((2, 1), (3, 1), (2, 2)):
        pool.run(tp * pp, qlora.train_on_ranks, run, tp, pp, tolerance)
