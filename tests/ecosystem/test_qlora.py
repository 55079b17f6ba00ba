"""QLoRA: plain ``peft`` over sharded quantised weights trains and saves adapters as on one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from oslo_models import registry
from oslo_models.checkpoint.quantized import PackedWeight

from support import qlora, quantized
from support.pool import Pool

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.quantization, pytest.mark.drawn(2, of="file")]


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "target_modules": "all-linear", **changes})


def write_plain(directory: Path, seed: int, **sizes: int) -> None:
    torch.manual_seed(seed)
    LlamaForCausalLM(quantized.llama_config(**sizes)).save_pretrained(directory)


TORCHAO = {
    "int8": lambda ao: ao.Int8WeightOnlyConfig(),
    "int4-groups": lambda ao: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(16)),
}


@pytest.mark.drawn(1)
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
"""Sizes with rows of whole blocks of 64; two ranks share the middle block of each row of ``o_proj``."""


def over_bitsandbytes(directory: Path, seed: int, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Train over weights quantised by bitsandbytes."""
    functional = pytest.importorskip("bitsandbytes.functional")
    config = transformers.BitsAndBytesConfig(**BITSANDBYTES[kind])
    write_plain(directory, seed, **BLOCKS)
    base: Any = LlamaForCausalLM.from_pretrained(directory, quantization_config=config, dtype=dtype)
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
    run = qlora.reference_run(directory, base, lora(), seed, quantization_config=config, dtype=dtype)
    run.dequantized, run.bytes_held = weights, held
    return run


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "kind", ["nf4-double", *(pytest.param(kind, marks=pytest.mark.zoo) for kind in ("nf4", "fp4", "int8"))]
)
def test_over_bitsandbytes(pool: Pool, tmp_path: Path, seed: int, kind: str) -> None:
    """Quantise while loading, and load a quantised checkpoint."""
    run = over_bitsandbytes(tmp_path, seed, kind)
    # On one process, bitsandbytes also quantises activation outliers to 8 bits; here they are not quantised.
    tolerance = 1e-5 if kind != "int8" else 3e-2
    for tp, pp in ((2, 1), (3, 1), (1, 2), (2, 2)):
        pool.run(tp * pp, qlora.train_on_ranks, run, tp, pp, tolerance)
    run.directory, run.options = tmp_path / "quantised", {}
    (tmp_path / "adapter").rename(run.saved)
    for tp, pp in ((2, 1), (2, 2)):
        pool.run(tp * pp, qlora.train_on_ranks, run, tp, pp, tolerance)


def test_over_bitsandbytes_in_bfloat16(pool: Pool, tmp_path: Path, seed: int) -> None:
    """Adapters are float32 with the same initial values; both results round activations differently."""
    run = over_bitsandbytes(tmp_path, seed, "nf4-double", torch.bfloat16)
    exact = LlamaForCausalLM.from_pretrained(tmp_path / "quantised")
    for module in exact.modules():  # transformers 5.24 keeps the dtype of a quantised checkpoint despite ``dtype``
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
        for param in module.parameters(recurse=False):
            if param.dtype == torch.bfloat16:
                param.data = param.data.float()
    rounding = qlora.error_of_logits(run, exact)
    assert 0 < rounding < 0.5
    # on ranks, partial sums are rounded once more
    pool.run(2, qlora.train_on_ranks, run, 2, 1, 4 * rounding)


def _use(directory: Path, tp: int, pp: int, dtype: torch.dtype) -> None:
    """On each rank: compare a model with quantised weights, in all its uses, with the dequantised model."""
    cls: Any = registry.find("GPT2LMHeadModel")
    plain = cls.from_pretrained_with_parallel(directory / "quantised", tp, pp, dequantize=True, dtype=dtype)
    model = cls.from_pretrained_with_parallel(directory / "quantised", tp, pp, dtype=dtype)
    read = cls.from_pretrained_with_parallel(
        directory, tp, pp, dtype=dtype, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)
    )
    packed = [name for name, param in model.named_parameters() if isinstance(param, PackedWeight)]
    assert len(packed) == 8 // pp and packed == [n for n, p in read.named_parameters() if isinstance(p, PackedWeight)]
    for name in packed:
        weight = model.get_parameter(name)
        assert torch.equal(weight.dequantize(), plain.get_parameter(name)), name
        assert torch.equal(read.get_parameter(name).dequantize(), plain.get_parameter(name)), name
    ids = torch.arange(6).view(2, 3)
    mask = torch.ones_like(ids)
    expected = plain.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for each in (model, copy.deepcopy(model), read):
        found = each.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(found, expected)
    assert model.is_loaded_in_4bit and "bytes" in repr(model.get_parameter(packed[0]))
    for call, message in (
        (lambda: model.save_pretrained_with_parallel(directory / "again"), "quantised weights are not saved"),
        (lambda: model.fuse(), "leave fuse out"),
        (lambda: model.get_parameter(packed[0]).data.add_(1), "cannot be changed"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="already quantised: leave out quantization_config"):
        cls.from_pretrained_with_parallel(
            directory / "quantised", tp, pp, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)
        )
    prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    weight = prepared.get_parameter(packed[0])
    assert isinstance(weight, PackedWeight) and weight.dtype == torch.float32
    adapted: Any = peft.get_peft_model(model, lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
    assert {param.dtype for param in adapted.parameters() if param.requires_grad} == {torch.float32}
    with pytest.raises(ValueError, match=r"not merged into quantised weights|cannot be changed"):
        adapted.merge_and_unload()


@pytest.mark.parametrize(("tp", "pp", "dtype"), [(2, 1, torch.bfloat16), (1, 2, torch.float32)])
def test_weights_that_stay_quantized(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int, dtype: Any) -> None:
    """``Conv1D`` layers with biases; their checkpoints hold transposed weights."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=64, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).to(dtype).save_pretrained(tmp_path)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model = GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=settings, dtype=dtype)
    model.save_pretrained(tmp_path / "quantised")
    pool.run(tp * pp, _use, tmp_path, tp, pp, dtype)


@pytest.mark.parametrize("on_the_fly", [False, True])
def test_deployed_with_weights_that_stay_quantized(forked: None, tmp_path: Path, seed: int, on_the_fly: bool) -> None:
    pytest.importorskip("bitsandbytes")
    write_plain(tmp_path, seed, **BLOCKS)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model: Any = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=settings)
    model.save_pretrained(tmp_path / "quantised")
    ids = quantized.tokens(seed)
    with torch.no_grad():
        expected = model.train()(input_ids=ids).logits
    directory, options = (tmp_path, {"quantization_config": settings}) if on_the_fly else (tmp_path / "quantised", {})
    cls: Any = registry.find("LlamaForCausalLM")
    with cls.from_pretrained_with_parallel(directory, 2, deploy=True, **options) as deployed:
        assert (deployed(input_ids=ids).logits - expected).abs().max() < 1e-5
