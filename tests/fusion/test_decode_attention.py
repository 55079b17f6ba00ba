"""C++ attention of single queries on a CPU: it matches torch for every mask, and models generate the same tokens."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from oslo_kernels import decode_attention as kernel
from oslo_models.fusion import decode_attention
from oslo_models.fusion.decode_attention import decoding_attention
from oslo_models.fusion.rules import fusion_candidates

from support import zoo
from support.float64 import lifted_casts
from support.mutants import Edit, with_mutant
from support.pool import Pool
from support.reference import parallel_model, reference_step

pytestmark = pytest.mark.skipif(kernel.unavailable_reason() is not None, reason="needs a C++ compiler")


def drawn(rng: random.Random, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
    """Draw queries, keys and values as views of larger memory, like in layers and caches, and masks of every kind."""
    batch, groups, each = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3)
    keys, width, value_width = rng.choice((1, 7, 31, 32, 33, 90)), rng.randint(1, 70), rng.randint(1, 70)
    query = torch.randn(batch, 1, groups * each, width, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(batch, groups, keys + 9, size, dtype=dtype)[:, :, 4:-5] for size in (width, value_width))
    shown = torch.rand(rng.choice((1, batch)), rng.choice((1, groups * each)), 1, keys) < 0.6
    if rng.random() < 0.5:  # padding on the left
        shown = torch.arange(keys) >= torch.randint(0, keys + 1, (batch, 1, 1, 1))
    added = torch.randn(rng.choice((1, batch)), rng.choice((1, groups * each)), 1, keys, dtype=dtype)
    if rng.random() < 0.3:
        added = added.masked_fill(torch.rand(added.shape) < 0.4, rng.choice((-torch.inf, torch.finfo(dtype).min)))
    return query, key, value, {"shown": rng.choice((None, shown)), "added": rng.choice((None, added))}


def expected_of(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, shown: Tensor | None, added: Tensor | None
) -> Tensor:
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores if added is None else scores + added
    scores = scores if shown is None else scores.masked_fill(~shown, -torch.inf)
    weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return (weights @ value).transpose(1, 2)


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2])
def test_attention_equals_torch(seed: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ELEMENTS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    try:
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            for _ in range(60):
                query, key, value, masks = drawn(rng, dtype)
                assert kernel.computes(query, key, value, tuple(masks.values()))
                scaling = rng.uniform(0.05, 1.0)
                found = kernel.attend(query, key, value, scaling, masks["shown"], masks["added"])
                wide = [x.double() for x in (query, key, value)]
                added = masks["added"] if masks["added"] is None else masks["added"].double()
                right = expected_of(wide[0], wide[1], wide[2], scaling, masks["shown"], added)
                assert found.dtype is dtype and found.is_contiguous()
                torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def test_keys_that_are_not_shown_are_not_read(seed: int) -> None:
    torch.manual_seed(seed)
    query, key, value = (torch.randn(2, 3, length, 8) for length in (1, 50, 50))
    shown = (torch.arange(50) >= torch.tensor([[11], [40]]))[:, None, None]
    expected = kernel.attend(query, key, value, 0.3, shown)
    key.masked_fill_(~shown.transpose(-1, -2), torch.nan)
    value[:, :, :11] = torch.nan
    assert torch.equal(kernel.attend(query, key, value, 0.3, shown), expected)
    key[0, 0, 30] = torch.nan  # visible keys are read
    found = kernel.attend(query, key, value, 0.3, shown)
    assert found[0, 0, 0].isnan().all() and torch.equal(found[1], expected[1])


@torch.no_grad()
def test_float32_is_as_exact_as_torch(seed: int) -> None:
    torch.manual_seed(seed)
    query, key, value = (torch.randn(4, 8, length, 64) for length in (1, 700, 700))
    query *= 5  # weights that differ by many orders of magnitude
    right = F.scaled_dot_product_attention(query.double(), key.double(), value.double()).transpose(1, 2)
    plain = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    error = (kernel.attend(query, key, value, 64**-0.5) - right).abs().max()
    assert error < 3 * (plain - right).abs().max() + 1e-7


def test_other_tensors_are_left_to_torch() -> None:
    query, key = torch.ones(2, 4, 1, 8), torch.ones(2, 2, 5, 8)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    assert not kernel.computes(query, key, key, (None,))  # gradients
    with torch.no_grad():
        assert kernel.computes(query, key, key, (mask, None))
        others = (
            (torch.ones(2, 4, 2, 8), key, mask),
            (query.half(), key.half(), mask),
            (query, key.double(), mask),
            (query, torch.ones(2, 3, 5, 8), mask),
            (query, key.transpose(-1, -2).contiguous().transpose(-1, -2), mask),
            (query, key, mask.long()),
            (query, key, mask[..., :4]),
            (query, key, mask[:, 0]),
            (query, key[:, :, :0], mask[..., :0]),
            (query, key[:1], mask),
            (query, key[..., :7], mask),
        )
        for other_query, other_key, other_mask in others:
            assert not kernel.computes(other_query, other_key, other_key, (other_mask,))
        assert not kernel.computes(query, key, key[:, :, :4], (mask,))


def check_model(step: Any, n: int) -> None:
    """Generate from left-padded rows, before and after fusing."""
    model = parallel_model(step.name, step.config, step.weights, n).eval()
    ids = step.batch["input_ids"]
    shown = torch.ones_like(ids)
    shown[0, :2] = 0
    tokens = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options: dict[str, Any] = {**tokens, "output_logits": True, "return_dict_in_generate": True}

    def generate() -> Any:
        with lifted_casts():
            return model.generate(ids, attention_mask=shown, **options)

    expected = generate()
    model.fuse(measure=False)
    with mock.patch.object(decode_attention, "attend", wraps=decode_attention.attend) as attend:
        found = generate()
    assert attend.call_count >= 4 and "one query per row" in str(model.fusion_report())
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    with mock.patch.object(decode_attention, "attend") as attend:
        model.train()
        with lifted_casts():
            model(**step.batch).loss.backward()
        model.eval().unfuse()
        generate()
    assert not attend.called


MODELS = (
    "gpt2",
    "opt",
    "gpt_neox",
    "llama",
    "llama-one-kv",
    "mistral",
    "qwen3",
    "phi3",
    "mixtral",
    "t5",
    "bart",
    "gemma",
)


@pytest.mark.parametrize("variant", [*MODELS, *zoo.cases(["qwen4_exp_text"])])
def test_fused_models_generate_with_it(variant: str, seed: int) -> None:
    check_model(reference_step(zoo.lm_head(variant), zoo.config(variant), seed), 1)


@pytest.mark.parametrize("variant", ["gpt2", "qwen3", "t5"])
def test_local_heads(variant: str, pool: Pool, seed: int) -> None:
    pool.run(2, check_model, reference_step(zoo.lm_head(variant), zoo.config(variant), seed), 2)


INDEXED = ("deepseek_v32", "axk2", "dots3_note_text", "glm_moe_dsa", "minimax_m3_vl_text")


@pytest.mark.parametrize("variant", [INDEXED[0], *zoo.cases(INDEXED[1:])])
def test_keys_that_an_indexer_has_not_chosen_stay_hidden(variant: str, seed: int) -> None:
    """Layers hide these keys only for attention implementations known by name, so fusing must not replace them."""
    step = reference_step(zoo.lm_head(variant), zoo.config(variant), seed)
    model, ids = parallel_model(step.name, step.config, step.weights, 1).eval(), step.batch["input_ids"]
    expected = logits_of_decoding(model, ids)
    for one, other in zip(expected, logits_of_decoding(model.fuse(measure=False), ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    model.unfuse()
    assert not [each for each in fusion_candidates(model, "triton") if each.operation == "attention" and each.cls]


def logits_of_decoding(model: Any, ids: Tensor) -> list[Tensor]:
    options: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    with lifted_casts():
        return list(model.generate(ids, max_new_tokens=4, do_sample=False, **options).logits)


MISTAKES = [
    Edit("fusion.decode_attention:decoding_attention", "attention_mask + added", "attention_mask"),
    Edit(
        "fusion.decode_attention:decoding_attention", "query.shape[-1] ** -0.5 if scaling is None else scaling", "1.0"
    ),
    Edit(
        "fusion.decode_attention:decoding_attention",
        "shown, added = attention_mask, position_bias",
        "shown = added = None",
    ),
]


@torch.no_grad()
def check_function(seed: int) -> None:
    """Compare the attention function of fused layers with transformers."""
    torch.manual_seed(seed)
    query, key = torch.randn(2, 3, 1, 8, dtype=torch.float64), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    shown = torch.rand(2, 1, 1, 9) < 0.8
    bias = torch.randn(1, 3, 1, 9, dtype=torch.float64)
    layer: Any = torch.nn.Module()
    for mask in (None, shown, torch.where(shown, 0.0, -1e9).double()):
        for position_bias in (None, bias):
            for scaling in (None, 0.2):
                given = {"scaling": scaling, "position_bias": position_bias}
                found, _ = decoding_attention(layer, query, key, key, mask, **given)
                expected, _ = sdpa_attention_forward(layer, query, key, key, mask, **given)
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_function_equals_transformers(seed: int) -> None:
    check_function(seed)
    layer: Any = torch.nn.Module()
    x = torch.ones(1, 1, 1, 4)
    with torch.no_grad(), pytest.raises(ValueError, match="softcap"):
        decoding_attention(layer, x, x, x, None, softcap=5.0)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda edit: edit.old)
def test_mistakes_are_caught(mistake: Edit, seed: int) -> None:
    with pytest.raises(AssertionError):
        with_mutant(mistake, lambda: check_function(seed))
