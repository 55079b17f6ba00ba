"""gpt-oss experts in mxfp4: each rank's shard equals the dequantised weights of transformers bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError

from support import quantized
from support.pool import Pool

SIZES = [(2, 1), (3, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.zoo)]


def write_checkpoint(directory: Path, seed: int) -> None:
    """Write a gpt-oss with random mxfp4 experts; the shards of two ranks end within blocks."""
    torch.manual_seed(seed)
    config = GptOssConfig(
        **{**quantized.SIZES, "hidden_size": 64, "intermediate_size": 96},
        **dict(num_key_value_heads=3, head_dim=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=5),
    )
    stored = {}
    for name, tensor in GptOssForCausalLM(config).state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor + 0.1 * torch.randn_like(tensor)
            continue
        experts, inputs, outputs = tensor.shape
        stored[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(118, 128, (experts, outputs, inputs // 32), dtype=torch.uint8)
    directory.mkdir()
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = ["GptOssForCausalLM"], torch.float32
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": settings}))


@pytest.mark.parametrize(("tp", "pp"), SIZES)
def test_mxfp4_experts_match_transformers(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int) -> None:
    folder = tmp_path / "gpt-oss"
    write_checkpoint(folder, seed)
    config = Mxfp4Config(dequantize=True)
    model: Any = GptOssForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float64).eval()
    stored, weights = load_file(folder / "model.safetensors"), model.state_dict()
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        plain = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float64)
        assert torch.equal(weights[name], plain)
    _, logits = quantized.reference(model, seed)
    read = pool.run(
        tp * pp, quantized.load_and_compare, folder, weights, logits, seed, tp, pp, 1 << 22, "GptOssForCausalLM"
    )
    sizes = {name: tensor.nbytes for name, tensor in stored.items() if name.endswith("_blocks")}
    for name, size in sizes.items():
        # of three blocks, two ranks share one
        assert size <= sum(of_rank.get(name, 0) for of_rank in read) <= size * 4 / 3, name


def test_damaged_blocks_are_refused(tmp_path: Path, seed: int) -> None:
    write_checkpoint(tmp_path / "gpt-oss", seed)
    file = tmp_path / "gpt-oss" / "model.safetensors"
    cls: Any = registry.find("GptOssForCausalLM")
    stored = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**stored, name: stored[name][..., :1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has shape .* and not \[experts, out, groups, 16\]"):
        cls.from_pretrained_with_parallel(tmp_path / "gpt-oss", dequantize=True)
