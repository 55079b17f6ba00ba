"""Tiny quantised checkpoints of Llama, and the comparison of a rank's shards with single-process weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from oslo_models import registry
from oslo_models.checkpoint import CheckpointReader
from oslo_models.checkpoint.quantized import PackedWeight, reader

from support.float64 import lifted_casts

SIZES = dict(vocab_size=61, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
"""Sizes with MLP shards that end within words and groups on three ranks."""

Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""Maps the weight of a linear layer to its quantised tensors by suffix, and to the dequantised weight."""


def llama_config(**changes: Any) -> LlamaConfig:
    sizes = dict(num_key_value_heads=3, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False)
    return LlamaConfig(**{**SIZES, **sizes, **changes})


def is_quantized(name: str) -> bool:
    """Whether a weight of `write_checkpoint` is quantised: the linear layers of the blocks are."""
    return name.endswith("_proj.weight")


def write_checkpoint(directory: Path, seed: int, settings: dict[str, Any], quantize: Quantize, **sizes: Any) -> Any:
    """Write a Llama with quantised linear layers; return the single-process model in float64."""
    torch.manual_seed(seed)
    config = llama_config(**sizes)
    full = LlamaForCausalLM(config).state_dict()
    stored, plain = {}, {}
    for name, weight in full.items():
        if not is_quantized(name):
            stored[name] = plain[name] = weight + 0.1 * torch.randn_like(weight)
            continue
        parts, plain[name] = quantize(torch.randn_like(weight))
        for suffix, part in parts.items():
            stored[f"{name.removesuffix('weight')}{suffix}"] = part.contiguous()
    directory.mkdir(exist_ok=True)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.float32
    written = {**config.to_dict(), "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(written))
    with lifted_casts():
        return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=plain, dtype=torch.float64).eval()


def fp8_settings(*block: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3", "activation_scheme": "dynamic"}


def fp8(height: int, width: int, as_exponents: bool = False) -> Quantize:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        plain, scales = torch.empty_like(weight), torch.empty(-(-rows // height), -(-columns // width))
        stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                scales[i, j] = weight[block].abs().max() / 448
                if as_exponents:
                    scales[i, j] = 2 ** scales[i, j].log2().ceil()
                stored[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                plain[block] = stored[block].float() * scales[i, j]
        saved = (scales.log2() + 127).to(torch.uint8) if as_exponents else scales
        return {"weight": stored, "weight_scale_inv": saved}, plain

    return quantize


def tokens(seed: int) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(seed))


def load_and_compare(
    directory: Path,
    expected: dict[str, Tensor],
    logits: Tensor,
    seed: int,
    tp: int,
    pp: int,
    chunk: int = 1 << 22,
    name: str = "LlamaForCausalLM",
    **options: Any,
) -> dict[str, int]:
    """In a worker, compare each parameter with its shard bit for bit, and the logits; return the bytes read."""
    logging.disable_progress_bar()
    read: dict[str, int] = {}
    copy = CheckpointReader.copy_region

    def counted(self: CheckpointReader, name: str, wanted: Any, out: Tensor, *shape: Any) -> None:
        read[name] = read.get(name, 0) + out.nbytes
        copy(self, name, wanted, out, *shape)

    cls: Any = registry.find(name)
    with patch.object(CheckpointReader, "copy_region", counted), patch.object(reader, "_CHUNK", chunk):
        model = cls.from_pretrained_with_parallel(
            directory, tp, pp, **{"dequantize": True, "dtype": torch.float64, **options}
        )
    assert not hasattr(model.config, "quantization_config")
    names = {} if model.stage is None else model.stage.full_names
    for key, param in model.named_parameters(remove_duplicate=False):
        full = expected[names.get(key, key)].to(param.dtype)
        is_packed = is_quantized(names.get(key, key)) and not options.get("dequantize", True)
        assert isinstance(param, PackedWeight) == is_packed, key
        local = param.dequantize() if isinstance(param, PackedWeight) else param.detach()
        assert torch.equal(local, model.layouts[key].shard(full, model.mesh.tp.rank)), key
        assert isinstance(param, torch.nn.Parameter) and param.requires_grad != is_packed
    with torch.no_grad(), lifted_casts():
        outputs = list(model(input_ids=tokens(seed))) if pp > 1 else [model(input_ids=tokens(seed))]
    if outputs[0].logits is not None and not options.keys() - {"dequantize"}:
        assert (torch.cat([output.logits for output in outputs]) - logits).abs().max() < 1e-10
    return read


def reference(model: Any, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the single-process weights and logits."""
    with torch.no_grad(), lifted_casts():
        return model.state_dict(), model(input_ids=tokens(seed)).logits
