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
