"""Checkpoints that split a model tensor, such as filters, into several tensors, or concatenate several into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError
from oslo_models.modeling import conversions, weight_mapping

from support import zoo


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (torch.zeros(24, 1, 5), r"k_conv1d\.weight is a \(24, 1, 5\) .*q_conv1d\.weight a "),
        (None, r"k_conv1d\.weight is a .* of torch\.int32, and .*q_conv1d\.weight a .* of torch\.float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path, part: torch.Tensor | None, says: str) -> None:
    """Without the check, integers would be read as filters."""
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
    with pytest.raises(CheckpointError, match=r"gqkv_proj\.weight .* has 143 rows, but its 4 parts .*self_attn\.gate"):
        registry.find("HrmTextForCausalLM").from_pretrained_with_parallel(tmp_path)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("olmo_hybrid", "OlmoHybridModel"),
        ("kimi_linear", "KimiLinearModel"),
        ("qwen4_exp_text", "Qwen4ExpTextModel"),
    ],
)
def test_base_models_load_the_parts_of_a_head(tmp_path: Path, variant: str, name: str) -> None:
    """Their names have a prefix there."""
    zoo.original(zoo.lm_head(variant))(zoo.config(variant)).save_pretrained(tmp_path)
    expected = zoo.original(name).from_pretrained(tmp_path).state_dict()
    own = registry.find(name).from_pretrained_with_parallel(tmp_path).state_dict()  # type: ignore[attr-defined]
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], expected[key]) for key in own)


@pytest.mark.parametrize("parts", [1, 50])
def test_embeddings_of_n_grams_are_saved_in_the_parts_of_transformers(tmp_path: Path, parts: int) -> None:
    """63 rows in 50 parts are 32 parts of two rows or one."""
    config = zoo.config("qwen4_exp_text", split_ngram_parts=parts)
    zoo.original("Qwen4ExpForCausalLM")(config).save_pretrained(tmp_path / "theirs")
    own = registry.find("Qwen4ExpForCausalLM").from_pretrained_with_parallel(tmp_path / "theirs")  # type: ignore[attr-defined]
    own.save_pretrained_with_parallel(tmp_path / "ours", save_with_merging=True)
    theirs, ours = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("theirs", "ours"))
    assert ours == theirs
    names = [name for name in load_file(tmp_path / "ours/model.safetensors") if ".ngram_embedding." in name]
    assert len(names) == (1 if parts == 1 else 32)


@pytest.mark.parametrize("is_joined", [True, False])
def test_patterns_need_not_end_in_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_joined: bool) -> None:
    """One conversion is for weights and biases, and for no longer name that begins like its pattern."""
    name, one, parts = (
        ("GPTNeoXForCausalLM", "attention.query_key_value", ["attention.q", "attention.k", "attention.v"])
        if is_joined
        else ("Qwen2ForCausalLM", "self_attn.qkv", [f"self_attn.{each}_proj" for each in "qkv"])
    )
    own: Any = registry.find(name)
    variant = own.config_class.model_type
    options = {} if is_joined else {"num_key_value_heads": zoo.config(variant).num_attention_heads}
    full = zoo.original(name)(zoo.config(variant, **options))
    with torch.no_grad():
        for param in full.parameters():
            param.normal_()
    full.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if (one if is_joined else parts[0]) in key]:
        if is_joined:
            values = tensors.pop(key).chunk(3)
            tensors |= {key.replace(one, part): value.clone() for part, value in zip(parts, values, strict=True)}
        else:
            tensors[key.replace(parts[0], one)] = torch.cat(
                [tensors.pop(key.replace(parts[0], part)) for part in parts]
            )
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    converter = WeightConverter(parts, one, [Concatenate(0)]) if is_joined else WeightConverter(one, parts, [Chunk(0)])
    for module in (weight_mapping, conversions):
        monkeypatch.setattr(module, "conversion_mapping", lambda *args, **kwargs: [converter])
    loaded = own.from_pretrained_with_parallel(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in full.state_dict().items())
    longer = f"model.layers.0.{one if is_joined else parts[0]}_scale"
    assert conversions._converter_of(longer, [converter]) is None


def test_conversions_without_a_reader_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A square matrix that transformers transposes fits without it, too."""
    name = zoo.lm_head("llama")
    zoo.original(name)(zoo.config("llama", head_dim=4)).save_pretrained(tmp_path)
    square = "self_attn.o_proj.weight"
    rows, columns = load_file(tmp_path / "model.safetensors")[f"model.layers.0.{square}"].shape
    assert rows == columns
    found = [WeightConverter(square, square, [Transpose(0, 1)])]
    monkeypatch.setattr(weight_mapping, "conversion_mapping", lambda *args, **kwargs: found)
    with pytest.raises(
        CheckpointError, match=r"computes model\.layers\.0\.self_attn\.o_proj\.weight from .* by Transpose"
    ):
        registry.find(name).from_pretrained_with_parallel(tmp_path)  # type: ignore[attr-defined]
