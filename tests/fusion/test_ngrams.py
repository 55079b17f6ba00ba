"""Blocking repeated n-grams: every implementation gives the scores of transformers."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from oslo_kernels import build, ngrams
from oslo_kernels.build import BuildError, load
from oslo_models import GPT2LMHeadModel
from oslo_models.fusion.ngram_processors import FusedEncoderNoRepeatNGram, FusedNoRepeatNGram

from support import zoo

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def in_torch(scores: Tensor, ids: Tensor, size: int, source: Tensor | None = None) -> Tensor:
    with mock.patch.multiple(ngrams, _compiled=lambda device: None):
        return ngrams.block_repeats_(scores, ids, size, source)


IMPLEMENTATIONS = {"compiled": ngrams.block_repeats_, "torch": in_torch}


def test_compiled_ngram_blocking_is_available() -> None:
    """Otherwise, tests of the compiled version would test plain torch."""
    assert ngrams._compiled("cpu") is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_block_repeats_matches_transformers(name: str, dtype: torch.dtype, seed: int) -> None:
    """Use few tokens, so that many repeat, all row lengths, tokens without a score, and scores of all strides."""
    torch.manual_seed(seed)
    block = IMPLEMENTATIONS[name]
    for size in (1, 2, 3, 4):
        for length in (0, 1, 2, 3, 7, 50):
            ids, scores = torch.randint(6, (6, length)), torch.randn(6, 5).to(dtype)
            expected = NoRepeatNGramLogitsProcessor(size)(ids, scores)
            given = scores.clone()
            assert block(given, ids, size) is given and torch.equal(given, expected)
            strided = torch.randn(12, 10).to(dtype)
            for view in (strided[::2, :5], strided[:6, ::2]):
                view.copy_(scores)
                assert torch.equal(block(view, ids.T.contiguous().T, size), expected)
            for rows in (1, 2, 6):
                source = torch.randint(5, (rows, 9))
                expected_of_source = EncoderNoRepeatNGramLogitsProcessor(size, source)(ids, scores)
                assert torch.equal(block(scores.clone(), ids, size, source), expected_of_source)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_block_repeats_handles_more_than_1024_tokens(name: str, seed: int) -> None:
    """OSLO's kernel silently did nothing beyond 1024 tokens."""
    torch.manual_seed(seed)
    ids, scores = torch.randint(30, (3, 3000)), torch.randn(3, 40)
    expected = NoRepeatNGramLogitsProcessor(3)(ids, scores)
    assert expected.isinf().any() and torch.equal(IMPLEMENTATIONS[name](scores.clone(), ids, 3), expected)


def test_processors_copy_scores_unless_in_place() -> None:
    ids, scores = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 3)
    for processor, replaced in (
        (FusedNoRepeatNGram(2), FusedNoRepeatNGram(2, in_place=True)),
        (FusedEncoderNoRepeatNGram(2, ids[:1]), FusedEncoderNoRepeatNGram(2, ids[:1], in_place=True)),
    ):
        given = scores.clone()
        assert processor(ids, given).isinf().any() and not given.isinf().any()
        assert replaced(ids, given) is given and given.isinf().any()


def test_generate_returns_unprocessed_logits_with_output_logits() -> None:
    """``output_logits`` returns unprocessed logits, which are the same tensor as the processors' input."""
    model = GPT2LMHeadModel(zoo.config("gpt2")).eval()
    ids = torch.tensor([[5, 6, 5, 6, 5]])
    options: dict[str, Any] = {"no_repeat_ngram_size": 2, "max_new_tokens": 6, "return_dict_in_generate": True}
    for beams in (1, 3):
        kept = {**options, "num_beams": beams, "output_logits": True, "output_scores": True, "do_sample": False}
        plain = model.generate(ids, **kept)
        fused = model.generate(ids, **kept, fused_no_repeat_ngram_blocking=True)
        for name in ("logits", "scores"):
            assert all(torch.equal(a, b) for a, b in zip(plain[name], fused[name], strict=True))
        assert not any(logits.isinf().any() for logits in fused.logits) and fused.scores[0].isinf().any()


def test_fused_no_repeat_ngram_blocking_of_the_config_enables_it() -> None:
    model = GPT2LMHeadModel(zoo.config("gpt2")).eval()
    with mock.patch("oslo_models.fusion.ngram_processors.block_repeats_", side_effect=ngrams.block_repeats_) as called:
        model.generate(torch.tensor([[5, 6]]), no_repeat_ngram_size=2, max_new_tokens=2)
        assert called.call_count == 0
        model.config.fused_no_repeat_ngram_blocking = True
        model.generate(torch.tensor([[5, 6]]), no_repeat_ngram_size=2, max_new_tokens=2)
        assert called.call_count == 2
        model.generate(
            torch.tensor([[5, 6]]), no_repeat_ngram_size=2, max_new_tokens=2, fused_no_repeat_ngram_blocking=False
        )
        assert called.call_count == 2


def test_block_repeats_without_a_compiler_uses_torch() -> None:
    with mock.patch.object(ngrams, "load", side_effect=BuildError("no compiler")):
        ngrams._compiled.cache_clear()
        try:
            ids = torch.tensor([[1, 2, 1]])
            assert ngrams.block_repeats_(torch.zeros(1, 3), ids, 2).tolist() == [[0, 0, float("-inf")]]
        finally:
            ngrams._compiled.cache_clear()


@pytest.mark.parametrize("place", ["CUDA_HOME", "PATH", "pip"])
def test_nvcc_is_found_with_its_libraries(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / ("nvidia/cu13" if place == "pip" else "cuda")
    for name in ("bin/nvcc", "lib/libcudart_static.a"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch(0o755)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(root / "bin") if place == "PATH" else "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    if place == "CUDA_HOME":
        monkeypatch.setenv("CUDA_HOME", str(root))
    if place == "pip" and Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("this machine has CUDA's compiler, which comes before pip's")
    assert build.find_nvcc() == root / "bin/nvcc"
    assert build._nvcc_command("ngrams.cpp")[-1] == f"-L{root / 'lib'}"


def test_a_failed_build_for_gpus_warns_once() -> None:
    with mock.patch.object(ngrams, "load", side_effect=BuildError("no nvcc")):
        ngrams._compiled.cache_clear()
        try:
            with pytest.warns(UserWarning, match="instead of a CUDA kernel: no nvcc"):
                assert ngrams._compiled("cuda") is None
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert ngrams._compiled("cuda") is None
        finally:
            ngrams._compiled.cache_clear()


def test_cuda_extension_compiles_or_names_nvcc() -> None:
    if build.find_nvcc() is None:
        with pytest.raises(BuildError, match="nvcc"):
            load("ngrams.cpp", cuda=True)
    else:
        assert load("ngrams.cpp", cuda=True).oslo_block_repeats is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["compiled", "triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_block_repeats_matches_transformers_on_a_gpu(name: str, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    compiled = ngrams._compiled("cuda") if name == "compiled" else None
    assert compiled is not None or name != "compiled", "nvcc is missing"
    language = ngrams.triton if name == "triton" else None
    with mock.patch.multiple(ngrams, _compiled=lambda device: compiled, triton=language):
        for size in (1, 2, 3):
            for length in (2, 50, 5000):
                ids, scores = torch.randint(40, (6, length)), torch.randn(6, 60).to(dtype)
                for source in (ids, torch.randint(40, (2, 300))):
                    expected = in_torch(scores.clone(), ids, size, source)
                    found = ngrams.block_repeats_(scores.cuda(), ids.cuda(), size, source.cuda())
                    assert torch.equal(found.cpu(), expected)
