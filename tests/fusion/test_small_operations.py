"""Norms and rotary positions of few rows on a CPU: one call of `oslo_kernels.small_operations` each."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from oslo_kernels import passes, small_operations
from oslo_models.fusion import norms, rotary_attention

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import parallel_model, reference_step

pytestmark = pytest.mark.skipif(small_operations.unavailable_reason() is not None, reason="needs a C++ compiler")


def heads(batch: int, count: int, length: int, width: int) -> Tensor:
    return torch.randn(batch, length, count, width, dtype=torch.float64).transpose(1, 2)


def test_small_operations_match_transformers(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(20):
        rows, width = draw.randint(1, 9), draw.randint(1, 200)
        x = torch.randn(rows, width, dtype=torch.float64)
        for cls, offset in ((LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
            norm = cls(width, eps=1e-5).double()
            torch.nn.init.normal_(norm.weight)
            with torch.no_grad(), lifted_casts():
                found = small_operations.rms_norm(x, norm.weight, 1e-5, offset)
                torch.testing.assert_close(found, norm(x), rtol=1e-12, atol=1e-12)
        batch, length, turned = draw.randint(1, 3), draw.randint(1, 4), 2 * draw.randint(1, 20)
        query, key = heads(batch, draw.randint(1, 5), length, turned), heads(batch, draw.randint(1, 3), length, turned)
        cos, sin = torch.randn(2, draw.choice([1, batch]), length, turned, dtype=torch.float64)
        expected = apply_rotary_pos_emb(query, key, cos, sin)
        rest = [heads(batch, x.shape[1], length, 3) for x in (query, key)]  # features without rotation
        wide = [torch.cat(pair, -1) for pair in zip((query, key), rest, strict=True)]
        for given, tails in (((query, key), None), (wide, rest)):
            found = small_operations.rotate(*given, cos, sin)
            for i in range(2):
                torch.testing.assert_close(found[i][..., :turned], expected[i], rtol=1e-12, atol=1e-12)
                assert tails is None or torch.equal(found[i][..., turned:], tails[i])


def check_decoding(step: Any, n: int) -> None:
    model = parallel_model(step.name, step.config, step.weights, n).eval()
    ids = step.batch["input_ids"][:, :3]
    with lifted_casts(), torch.no_grad():
        expected = model(ids).logits
        model.fuse(measure=False)
        with (
            mock.patch.object(norms, "rms_norm", wraps=norms.rms_norm) as norm,
            mock.patch.object(small_operations, "rotate", wraps=small_operations.rotate) as rotate,
        ):
            found = model(ids).logits
        assert norm.called and rotate.called
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-10, atol=1e-10)
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with (
        mock.patch.object(rotary_attention, "rotate_in_torch") as attended,
        mock.patch.object(passes, "rotate", wraps=passes.rotate) as rotate,
        mock.patch.object(passes, "rms_norm", wraps=passes.rms_norm) as norm,
    ):
        model(ids, labels=ids).loss.backward()
    assert rotate.called and norm.called and not attended.called


@pytest.mark.parametrize("variant", ["llama", "gemma", "phi3"])
def test_fused_models_call_them(variant: str, seed: int) -> None:
    check_decoding(reference_step(zoo.lm_head(variant), zoo.config(variant), seed), 1)


def test_local_heads(pool: Pool, seed: int) -> None:
    pool.run(2, check_decoding, reference_step(zoo.lm_head("qwen3"), zoo.config("qwen3"), seed), 2)


def test_large_or_other_tensors_are_left_to_torch() -> None:
    weight = torch.ones(8)
    with torch.no_grad():
        assert small_operations.computes(torch.ones(2, 8), weight)
        assert not small_operations.computes(torch.ones(small_operations.MOST, 8), weight)
        assert not small_operations.computes(torch.ones(2, 8).half(), weight.half())
        assert not small_operations.computes(torch.ones(2, 8), weight.double())
    assert not small_operations.computes(torch.ones(2, 8), weight)
