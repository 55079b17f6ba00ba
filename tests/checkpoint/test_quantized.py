"""Quantised checkpoints: each rank's shard equals the weights dequantised in one process bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import FineGrainedFP8Config, LlamaForCausalLM

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError

from support import qlora, quantized
from support.pool import Pool

pytestmark = [pytest.mark.quantization, pytest.mark.drawn(10, of="file")]

SIZES = pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (2, 2)])


def compare(pool: Pool, directory: Path, model: Any, seed: int, tp: int, pp: int, **options: Any) -> Any:
    weights, logits = quantized.reference(model, seed)
    return pool.run(tp * pp, _compare, directory, weights, logits, seed, tp, pp, options)


def _compare(*args: Any) -> Any:
    return quantized.load_and_compare(*args[:-1], **args[-1])


# ---- float8 in blocks


@SIZES
def test_fp8_blocks_match_transformers(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int) -> None:
    model = quantized.write_checkpoint(tmp_path / "fp8", seed, quantized.fp8_settings(8, 16), quantized.fp8(8, 16))
    config = FineGrainedFP8Config(weight_block_size=(8, 16), dequantize=True)
    original = LlamaForCausalLM.from_pretrained(tmp_path / "fp8", quantization_config=config, dtype=torch.float64)
    assert all(torch.equal(original.state_dict()[name], weight) for name, weight in model.state_dict().items())
    compare(pool, tmp_path / "fp8", model, seed, tp, pp)


@pytest.mark.parametrize("as_exponents", [False, True])
def test_fp8_blocks_cut_at_the_edge(pool: Pool, tmp_path: Path, seed: int, as_exponents: bool) -> None:
    """DeepSeek's latent attention has such blocks; transformers raises there, or assumes smaller blocks everywhere."""
    model = quantized.write_checkpoint(
        tmp_path / "fp8", seed, quantized.fp8_settings(32, 7), quantized.fp8(32, 7, as_exponents)
    )
    for tp, pp in ((2, 1), (3, 1)):
        compare(pool, tmp_path / "fp8", model, seed, tp, pp)
    compare(pool, tmp_path / "fp8", model, seed, 2, 1, dtype=torch.bfloat16)


def test_fp8_with_one_scale_for_each_weight(pool: Pool, tmp_path: Path, seed: int) -> None:
    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().max() / 448
        stored = (weight / scale).to(torch.float8_e4m3fn)
        unused = torch.tensor(0.5)
        return {"weight": stored, "weight_scale_inv": scale, "activation_scale": unused}, stored.float() * scale

    settings = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    model = quantized.write_checkpoint(tmp_path / "fp8", seed, settings, quantize)
    compare(pool, tmp_path / "fp8", model, seed, 3, 1)


# ---- GPTQ


def gptq_settings(bits: int, group_size: int, kind: str | None = "gptq", desc_act: bool = False) -> dict[str, Any]:
    named = {} if kind is None else {"checkpoint_format": kind}
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": False, **named}


def pack(values: Tensor, bits: int, dim: int) -> Tensor:
    """Pack element ``i`` into word ``i // n``, from bit ``bits * (i % n)`` on, where ``n`` elements fit a word."""
    per_word = 32 // bits
    values = values.long() if dim == 1 else values.long().T
    words = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.long)
    for i in range(values.shape[1]):
        words[:, i // per_word] |= values[:, i] << bits * (i % per_word)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    return words if dim == 1 else words.T


def gptq(settings: dict[str, Any], with_g_idx: bool = True) -> quantized.Quantize:
    """Draw integers, scales and zero points; compute the weight by the definition of the format."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        (rows, columns), bits, size = weight.shape, settings["bits"], settings["group_size"]
        size = size if size > 0 else columns
        integers, groups = torch.randint(2**bits, (columns, rows)), torch.arange(columns) // size
        if settings["desc_act"]:
            groups = groups[torch.randperm(columns)]
        # The first version of the format cannot express a zero point of zero.
        zeros = torch.randint(1, 2**bits, (-(-columns // size), rows))
        scales = (torch.rand(zeros.shape) / 2**bits + 0.01).half()
        stored = zeros - int(settings.get("checkpoint_format") != "gptq_v2")
        parts = {"qweight": pack(integers, bits, 0), "qzeros": pack(stored, bits, 1), "scales": scales}
        if with_g_idx:
            parts["g_idx"] = groups.int()
        plain = torch.empty_like(weight)
        for i, group in enumerate(groups.tolist()):
            plain[:, i] = (integers[i] - zeros[group]) * scales[group].float()
        return parts, plain

    return quantize


@SIZES
def test_gptq_with_important_features_first(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int) -> None:
    settings = gptq_settings(4, 16, desc_act=True)
    model = quantized.write_checkpoint(tmp_path / "gptq", seed, settings, gptq(settings))
    compare(pool, tmp_path / "gptq", model, seed, tp, pp, chunk=300)  # a few rows at a time


@pytest.mark.drawn(3)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", [None, "gptq", "gptq_v2"])
def test_gptq_of_all_widths_and_versions(pool: Pool, tmp_path: Path, seed: int, bits: int, kind: str | None) -> None:
    # The heads of 8 channels of two ranks end within a word of 2-bit zero points.
    sizes = dict(intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, head_dim=8, hidden_size=32)
    for size, with_g_idx in ((16, False), (-1, True), (-1, False)):
        settings = gptq_settings(bits, size, kind)
        directory = tmp_path / f"{size}-{with_g_idx}"
        model = quantized.write_checkpoint(directory, seed, settings, gptq(settings, with_g_idx), **sizes)
        compare(pool, directory, model, seed, 3, 1)


# ---- AWQ


def awq(group_size: int) -> quantized.Quantize:
    """Draw integers in the packing of AutoAWQ; compute the weight like the converter of compressed-tensors."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        integers = torch.randint(16, (columns, rows))
        zeros = torch.randint(16, (columns // group_size, rows))
        scales = (torch.rand(zeros.shape) / 16 + 0.01).half()
        order = torch.arange(rows).view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
        parts = {"qweight": pack(integers[:, order], 4, 1), "qzeros": pack(zeros[:, order], 4, 1), "scales": scales}
        groups = torch.arange(columns) // group_size
        return parts, ((integers - zeros[groups]) * scales[groups].float()).T

    return quantize


@SIZES
def test_awq(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    model = quantized.write_checkpoint(tmp_path / "awq", seed, settings, awq(16))
    converter = pytest.importorskip("compressed_tensors.entrypoints.convert.converters").AutoAWQConverter
    stored = load_file(tmp_path / "awq" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj."
    weight, scales, zeros = converter(group_size=16)._convert_gemm_module(
        *(stored[name + part] for part in ("qweight", "scales", "qzeros"))
    )
    by_library = (weight.view(-1, 5, 16) - zeros.unsqueeze(-1)) * scales.unsqueeze(-1).float()
    assert torch.equal(by_library.flatten(1).double(), model.state_dict()[name + "weight"])
    compare(pool, tmp_path / "awq", model, seed, tp, pp)


# ---- compressed-tensors


def compressed(bits: int, kind: str, form: str, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, **more}
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def by_compressed_tensors(settings: dict[str, Any]) -> quantized.Quantize:
    """Compress and decompress the weight with the library."""
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import BaseCompressor

    scheme = library.QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor, args = BaseCompressor.get_value_from_registry(settings["format"]), scheme.weights

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        grids = {
            "tensor": (1,),
            "channel": (rows, 1),
            "group": (rows, columns // (args.group_size or 1)),
            "block": tuple(-(-n // unit) for n, unit in zip(weight.shape, args.block_structure or (1, 1), strict=True)),
        }
        state = {"weight": weight, "weight_scale": torch.rand(grids[args.strategy]) / 2**args.num_bits + 0.02}
        zeros = torch.zeros(grids[args.strategy], dtype=torch.int8)
        state["weight_zero_point"] = zeros if args.symmetric else torch.randint_like(zeros, -4, 4)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    return quantize


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "settings",
    [
        compressed(4, "int", "pack-quantized", "group", group_size=16),
        compressed(4, "int", "pack-quantized", "group", symmetric=False, group_size=8),
        compressed(8, "int", "pack-quantized", "channel"),
        compressed(3, "int", "pack-quantized", "channel", symmetric=False),
        compressed(8, "int", "int-quantized", "channel"),
        compressed(8, "int", "int-quantized", "group", symmetric=False, group_size=16),
        compressed(8, "float", "float-quantized", "tensor"),
        compressed(8, "float", "float-quantized", "channel"),
        compressed(8, "float", "naive-quantized", "block", block_structure=[16, 12]),
    ],
    ids=lambda settings: "-".join(
        str(settings["config_groups"]["group_0"]["weights"][key]) for key in ("type", "num_bits", "strategy")
    ),
)
def test_compressed_tensors(pool: Pool, tmp_path: Path, seed: int, settings: dict[str, Any]) -> None:
    directory = tmp_path / "compressed"
    model = quantized.write_checkpoint(directory, seed, settings, by_compressed_tensors(settings))
    for tp, pp in ((2, 1), (3, 1)):
        compare(pool, directory, model, seed, tp, pp)


# ---- bitsandbytes


def bnb_4bit(kind: str, nested: bool, storage: torch.dtype = torch.uint8) -> quantized.Quantize:
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        packed, state = functional.quantize_4bit(
            weight.bfloat16(), blocksize=64, compress_statistics=nested, quant_type=kind, quant_storage=storage
        )
        parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        # Blocks are of consecutive elements; the library's kernel for CPUs takes each row to begin a new one.
        state.shape = torch.Size([1, weight.numel()])
        plain = functional.dequantize_4bit(packed, state).view(weight.shape)
        assert (plain - weight).abs().max() < 0.25 * weight.abs().max()
        return {"weight": packed, **parts}, plain

    return quantize


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("kind", "nested", "storage"),
    [
        ("nf4", True, torch.uint8),
        ("nf4", False, torch.bfloat16),
        ("fp4", False, torch.uint8),
        ("fp4", True, torch.uint8),
    ],
)
@pytest.mark.parametrize("aligned", [False, True])
def test_bitsandbytes_4bit(
    pool: Pool, tmp_path: Path, seed: int, kind: str, nested: bool, storage: torch.dtype, aligned: bool
) -> None:
    """Rows are whole blocks, or blocks continue across rows."""
    sizes = dict(hidden_size=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=192) if aligned else {}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    quantize = bnb_4bit(kind, nested, storage)
    model = quantized.write_checkpoint(tmp_path / "bnb", seed, settings, quantize, **sizes)
    for tp, pp in ((2, 1), (3, 1)):
        compare(pool, tmp_path / "bnb", model, seed, tp, pp)


@SIZES
def test_bitsandbytes_8bit(pool: Pool, tmp_path: Path, seed: int, tp: int, pp: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        values, scales, _ = functional.int8_vectorwise_quant(weight.half())
        parts = {"weight": values, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return parts, functional.int8_vectorwise_dequant(values, scales)

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    model = quantized.write_checkpoint(tmp_path / "bnb", seed, settings, quantize)
    compare(pool, tmp_path / "bnb", model, seed, tp, pp)


# ---- weights that stay quantised


def _formats() -> dict[str, tuple[dict[str, Any], Any]]:
    fp8_one = compressed(8, "float", "float-quantized", "channel")
    packed = compressed(4, "int", "pack-quantized", "group", group_size=16)
    gptq_one = gptq_settings(4, 16, desc_act=True)
    awq_one = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    return {
        "fp8": (quantized.fp8_settings(8, 16), lambda: quantized.fp8(8, 16)),
        "gptq": (gptq_one, lambda: gptq(gptq_one)),
        "awq": (awq_one, lambda: awq(16)),
        "pack-quantized": (packed, lambda: by_compressed_tensors(packed)),
        "float-quantized": (fp8_one, lambda: by_compressed_tensors(fp8_one)),
        "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda: bnb_4bit("nf4", True)),
    }


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", _formats())
def test_weights_stay_quantized(pool: Pool, tmp_path: Path, seed: int, name: str) -> None:
    """Shards of three ranks end within words, groups and blocks; the ranks hold these whole."""
    settings, make = _formats()[name]
    model = quantized.write_checkpoint(tmp_path, seed, settings, make())
    for tp, pp in ((3, 1), (2, 2)):
        compare(pool, tmp_path, model, seed, tp, pp, dequantize=False)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_adapters_train_over_quantized_weights(pool: Pool, tmp_path: Path, seed: int, name: str) -> None:
    """Training matches training over dequantised weights in one process, in float64."""
    peft = pytest.importorskip("peft")
    settings, make = _formats()[name]
    base = quantized.write_checkpoint(tmp_path, seed, settings, make())
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear", use_dora=name == "fp8")
    run = qlora.reference_run(tmp_path, base, adapter, seed, dtype=torch.float64)
    for tp, pp in ((2, 1), (3, 1), (2, 2)):
        pool.run(tp * pp, qlora.train_on_ranks, run, tp, pp, 1e-10)


# ---- reading


@pytest.mark.parametrize("name", ["fp8", "gptq", "awq", "pack-quantized", "bitsandbytes"])
def test_ranks_read_their_shards_only(pool: Pool, tmp_path: Path, seed: int, name: str) -> None:
    """Where shards are whole blocks, the ranks together read each quantised element once."""
    settings: dict[str, Any]
    suffix, quantize = "weight", quantized.fp8(16, 64)
    settings = quantized.fp8_settings(16, 64)
    if name == "gptq":
        settings = gptq_settings(4, 64)
        suffix, quantize = "qweight", gptq(settings)
    elif name == "awq":
        settings = {"quant_method": "awq", "bits": 4, "group_size": 64}
        suffix, quantize = "qweight", awq(64)
    elif name == "pack-quantized":
        settings = compressed(4, "int", name, "group", group_size=64)
        suffix, quantize = "weight_packed", by_compressed_tensors(settings)
    elif name == "bitsandbytes":
        settings, quantize = {"quant_method": name, "load_in_4bit": True}, bnb_4bit("nf4", True)
    sizes = dict(hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=16, intermediate_size=256)
    model = quantized.write_checkpoint(tmp_path / name, seed, settings, quantize, **sizes)
    by_rank = compare(pool, tmp_path / name, model, seed, 2, 1)
    stored = load_file(tmp_path / name / "model.safetensors")
    names = [key for key in stored if key.endswith(f"_proj.{suffix}")]
    assert len(names) == 14
    for key in names:
        assert [read[key] for read in by_rank] == [stored[key].nbytes // 2] * 2, key


def _read_without_scales(directory: Path) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(quantized.llama_config(), 2, seed=0)
    with pytest.raises(ValueError, match=r"quantised weights \(model.*weight_scale_inv\), .* dequantize=True"):
        model.from_parallelized(directory)
    with pytest.raises(ValueError, match=r"only with quantization_config in config\.json"):
        cls.from_pretrained_with_parallel(directory, 2)


def test_quantized_values_are_never_read_without_scales(pool: Pool, tmp_path: Path, seed: int) -> None:
    """A float8 weight has the name and the shape of a plain one."""
    quantized.write_checkpoint(tmp_path / "fp8", seed, quantized.fp8_settings(8, 16), quantized.fp8(8, 16))
    quantized.llama_config().save_pretrained(tmp_path / "fp8")
    pool.run(2, _read_without_scales, tmp_path / "fp8")


def _find_damage(directory: Path) -> None:
    cls: Any = registry.find("LlamaForCausalLM")
    with pytest.raises(CheckpointError, match=r"down_proj.* (has no tensor 'qzeros' beside g_idx, qweight, scales)"):
        cls.from_pretrained_with_parallel(directory, 2, dequantize=True)


def test_missing_parts_of_a_quantized_weight_are_named(pool: Pool, tmp_path: Path, seed: int) -> None:
    settings = gptq_settings(4, 16)
    quantized.write_checkpoint(tmp_path / "gptq", seed, settings, gptq(settings))
    path = tmp_path / "gptq" / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.1.mlp.down_proj.qzeros"]
    save_file(stored, path)
    pool.run(2, _find_damage, tmp_path / "gptq")
