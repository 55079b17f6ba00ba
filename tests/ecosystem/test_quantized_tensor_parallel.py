"""Quantised models over the devices of one process: exact, or refused by name, with the way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import oslo_models

pytestmark = pytest.mark.quantization
torchao = pytest.importorskip("torchao.quantization")
IDS = torch.tensor([[5, 6, 7, 8]])


def llama(seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    return hf.LlamaForCausalLM(config).to(dtype).eval()


def scales(kind: str) -> Any:
    rows, groups = torchao.PerRow(), torchao.PerGroup(32)
    return {
        "int8": lambda: torchao.Int8WeightOnlyConfig(),
        "float8": lambda: torchao.Float8WeightOnlyConfig(),
        "int4 in groups": lambda: torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups),
        "int8 dynamic": lambda: torchao.Int8DynamicActivationInt8WeightConfig(granularity=rows),
    }[kind]()


@pytest.mark.parametrize("kind", ["int8", "float8", "int4 in groups"])
def test_weights_of_torchao_are_sharded(kind: str, seed: int) -> None:
    """Each device holds its part of the quantised weights, with the same values as one process."""
    model = llama(seed)
    torchao.quantize_(model.model, scales(kind))
    state = {name: tensor.dequantize() for name, tensor in model.named_parameters() if "proj" in name}
    other = oslo_models.tensor_parallel(model, ["cpu"] * 2)
    with torch.no_grad():
        torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    for rank, part in enumerate(other.parts):
        for name, param in part.named_parameters():
            if "proj" in name:
                assert type(param).__module__.startswith("torchao.")
                assert torch.equal(param.dequantize(), part.layouts[name].shard(state[name], rank))
    with pytest.raises(ValueError, match=r"is quantised .* the original model has them"):
        other.state_dict()


def test_dynamic_quantisation_differs_by_no_more_than_quantisation_does(seed: int) -> None:
    """Each row-parallel layer quantises its part of an activation with a separate scale."""
    model = llama(seed)
    plain = model(IDS).logits.detach()
    torchao.quantize_(model.model, scales("int8 dynamic"))
    other = oslo_models.tensor_parallel(model, ["cpu"] * 2)
    with torch.no_grad():
        assert (other(IDS).logits - plain).norm() < 1.5 * (model(IDS).logits - plain).norm()


def test_scales_of_elements_on_several_devices_are_refused(seed: int) -> None:
    model = llama(seed)
    config = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=torchao.PerGroup(64))
    torchao.quantize_(model.model, config)
    expected = model(IDS).logits
    with pytest.raises(ValueError, match=r"o_proj.weight is quantised .* a group size that divides the shards"):
        oslo_models.tensor_parallel(model, ["cpu"] * 2)
    assert torch.equal(model(IDS).logits, expected)
    for start in (
        lambda: oslo_models.initialize(model, {}),
        lambda: oslo_models.parallelize(model, num_gpus=1),
    ):
        with pytest.raises(ValueError, match="is quantised"):
            start()
    assert type(model) is hf.LlamaForCausalLM and torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("kind", ["Linear8bitLt", "Linear4bit"])
def test_layers_of_bitsandbytes_are_refused_by_name(kind: str, seed: int) -> None:
    """`dequantize` is the way out."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = llama(seed)
    plain = copy.deepcopy(model)
    for block in model.model.layers:
        old: nn.Linear = block.mlp.up_proj
        block.mlp.up_proj = getattr(bitsandbytes.nn, kind)(old.in_features, old.out_features, bias=False)
    for start in (
        lambda: oslo_models.tensor_parallel(model, ["cpu"] * 2),
        lambda: oslo_models.initialize(model, {}),
        lambda: oslo_models.parallelize(model, num_gpus=1),
    ):
        with pytest.raises(ValueError, match=rf"up_proj is a layer of bitsandbytes \({kind}\).*dequantize"):
            start()
    oslo_models.tensor_parallel(plain, ["cpu"] * 2)
