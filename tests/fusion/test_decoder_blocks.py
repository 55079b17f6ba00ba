"""Decoder blocks in C++: they match transformers with every cache, and leave some calls to Python."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from oslo_kernels import build, decoder_block
from oslo_models.cache_argument import generation_name
from oslo_models.fusion import block_timing
from oslo_models.fusion.decoder_blocks import BlockDecoding
from oslo_models.fusion.growing_cache import let_grow

from support import zoo
from support.mutants import Edit, with_mutant
from support.pool import Pool, WorkerError
from support.reference import full_parameters, parallel_model, reference_model

pytestmark = [
    pytest.mark.skipif(decoder_block.unavailable_reason() is not None, reason="needs a C++ compiler"),
    pytest.mark.drawn(20, of="file"),
]

SIZES: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12, "num_hidden_layers": 2}
KEYS_AND_VALUES: dict[str, Any] = {**SIZES, "num_key_value_heads": 6, "intermediate_size": 60}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_head": 6, "n_layer": 2},
    "llama": {**KEYS_AND_VALUES, "attention_bias": True, "mlp_bias": False},
    "mistral": {**KEYS_AND_VALUES, "sliding_window": 4, "head_dim": 10},
    "qwen2": KEYS_AND_VALUES,
    "qwen3": {**KEYS_AND_VALUES, "head_dim": 10},
    "gemma": {**KEYS_AND_VALUES, "head_dim": 10},
    "smollm3": {**KEYS_AND_VALUES, "no_rope_layers": [1, 0]},
}
"""Models with blocks in C++. Sizes give each of three ranks at least eight columns."""


def config_of(variant: str) -> Any:
    return zoo.config(variant, **CHANGES[variant])


def drawn_weights(variant: str, seed: int) -> dict[str, Tensor]:
    model = reference_model(zoo.lm_head(variant), config_of(variant), seed)
    return {**dict(model.named_buffers()), **full_parameters(model)}


class Counted:
    """Counts block calls computed in C++, and calls left to Python."""

    def __init__(self) -> None:
        self.computed = self.left = 0

    def __enter__(self) -> Counted:
        original = BlockDecoding.__call__

        def counted(decoding: BlockDecoding, *args: Any, **kwargs: Any) -> Tensor | None:
            found = original(decoding, *args, **kwargs)
            self.computed += found is not None
            self.left += found is None
            return found

        self._patch = mock.patch.object(BlockDecoding, "__call__", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()


@torch.no_grad()
def logits_of(model: Any, seed: int, cache: Any = None, rows: int = 3, steps: int = 4) -> Tensor:
    """Return logits ``[rows, steps, vocab]`` of a left-padded prompt, and of single tokens that follow it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (rows, 5 + steps), generator=generator)
    shown = torch.ones_like(ids)
    shown[0, :2] = 0
    cache = DynamicCache(config=model.config) if cache is None else cache
    found = []
    for begin, end in ((0, 5), *((5 + i, 6 + i) for i in range(steps))):
        positions = (shown[:, :end].cumsum(-1) - 1).clamp(min=0)[:, begin:]
        given = {"attention_mask": shown[:, :end], "position_ids": positions, generation_name(): cache}
        found.append(model(ids[:, begin:end], **given, use_cache=True).logits[:, -1])
    return torch.stack(found[1:], 1)


def check_logits(
    variant: str, weights: dict[str, Tensor], seed: int, ranks: int, narrow: str | None = None, check: bool = True
) -> None:
    """Compare a fused model with the unfused model in float64; with narrow weights, with its separate layers."""
    name, config = zoo.lm_head(variant), config_of(variant)
    right = logits_of(parallel_model(name, config, weights, ranks).eval(), seed)
    model = parallel_model(name, config, weights, ranks, dtype=torch.float32).eval()
    plain = logits_of(model, seed)
    model.fuse(measure=False, weights=narrow, check=check)
    blocks = [module for module in model.modules() if isinstance(getattr(module, "decoding", None), BlockDecoding)]
    assert len(blocks) == 2
    if narrow:
        for block in blocks:
            block.decoding.faster = (frozenset(), 1)
        with Counted() as counted:
            plain = right = logits_of(model, seed)
        assert counted.computed == 0
        for block in blocks:
            block.decoding.faster = None
    with Counted() as counted:
        found = logits_of(model, seed)
    assert (counted.computed, counted.left) == (4 * 2, 2)  # the prompt is left to torch
    error, scale = (found.double() - right).abs().max(), right.abs().max()
    assert error < 4 * (plain.double() - right).abs().max() + (1e-4 if narrow == "int8" else 2e-6) * scale


@pytest.mark.stacks
@pytest.mark.parametrize("variant", CHANGES)
def test_logits_equal_transformers(variant: str, seed: int) -> None:
    check_logits(variant, drawn_weights(variant, seed), seed, 1)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "qwen3"])
def test_ranks_sum(variant: str, ranks: int, pool: Pool, seed: int) -> None:
    pool.run(ranks, check_logits, variant, drawn_weights(variant, seed), seed, ranks)


def check_other_sums(weights: dict[str, Tensor], seed: int) -> None:
    """Check a rank that is later than a C++ call waits, and ranks without shared memory."""
    model = parallel_model(zoo.lm_head("llama"), config_of("llama"), weights, 2, dtype=torch.float32).eval()
    expected = logits_of(model.fuse(measure=False), seed)
    late, begin = iter((True,)), decoder_block.begin

    def slow(*args: Any) -> None:
        if model.mesh.tp.rank and next(late, False):
            time.sleep(0.5)
        begin(*args)

    with mock.patch.object(decoder_block, "begin", slow), Counted() as counted:
        assert torch.equal(logits_of(model, seed), expected)
    assert counted.computed == 8
    without = mock.patch("oslo_models.fusion.decoder_blocks.shared_memory_of", lambda axis: None)
    with without, Counted() as counted:
        assert torch.equal(logits_of(model, seed), expected)
    assert counted.computed == 8


def test_late_ranks_and_ranks_without_shared_memory_sum_too(pool: Pool, seed: int) -> None:
    pool.run(2, check_other_sums, drawn_weights("llama", seed), seed)


@pytest.mark.parametrize("narrow", ["bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_weights_of_fewer_bits(variant: str, narrow: str, seed: int) -> None:
    check_logits(variant, drawn_weights(variant, seed), seed, 1, narrow)


def fused(variant: str, seed: int) -> Any:
    weights = drawn_weights(variant, seed)
    model = parallel_model(zoo.lm_head(variant), config_of(variant), weights, 1, dtype=torch.float32)
    return model.eval().fuse(measure=False)


@pytest.mark.stacks
@pytest.mark.parametrize("variant", ["llama", "gpt2", "mistral"])
def test_every_cache(variant: str, seed: int) -> None:
    model = fused(variant, seed)
    expected = logits_of(model, seed)
    growing = DynamicCache()
    let_grow(growing)
    for cache in (growing, StaticCache(model.config, max_cache_len=16), DynamicCache()):
        if variant == "mistral" and type(cache) is DynamicCache:
            cache = DynamicCache(config=model.config)
        with Counted() as counted:
            found = logits_of(model, seed, cache)
        assert counted.computed == 8
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_cache_in_another_dtype(seed: int) -> None:
    """C++ cannot read the keys: torch computes attention, and C++ computes the rest of the block."""
    model = fused("llama", seed)
    expected = logits_of(model, seed)
    attention = mock.patch.object(decoder_block.decode_attention, "computes", lambda *_: False)
    with attention, Counted() as counted:
        found = logits_of(model, seed)
    assert counted.computed == 8
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def one_token(model: Any, **options: Any) -> Any:
    cache = DynamicCache()
    ids = torch.tensor([[5, 6, 7]])
    model(ids, **{generation_name(): cache}, use_cache=True)
    return model(ids[:, :1], **{generation_name(): cache}, use_cache=True, **options)


def _hook_inside(model: Any) -> None:
    model.get_submodule("model.layers.0.mlp").register_forward_hook(lambda *_: None)
    model.get_submodule("model.layers.1.self_attn.q_proj").register_forward_pre_hook(lambda *_: None)


def _own_forward(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.forward = block.mlp.forward


def _another_layer(model: Any) -> None:
    for block in model.model.layers:
        block.self_attn.q_proj = torch.nn.Sequential(block.self_attn.q_proj)


def _another_class(model: Any) -> None:
    for block in model.model.layers:
        block.mlp.down_proj.__class__ = type(
            "Other", (torch.nn.Linear,), {"forward": lambda self, x: x @ self.weight.t()}
        )


@pytest.mark.parametrize(
    "change",
    [
        *(_hook_inside, _own_forward, _another_layer, _another_class, torch.nn.Module.train),
        lambda model: model.bfloat16(),
    ],
)
def test_changed_blocks_are_left_to_torch(change: Callable[[Any], object], seed: int) -> None:
    model = fused("llama", seed)
    with Counted() as counted:
        one_token(model)
        assert counted.computed == 2
        change(model)
        one_token(model)
    assert counted.computed == 2


def test_changed_weights_count(seed: int) -> None:
    model = fused("llama", seed)
    before = one_token(model).logits
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    in_place = one_token(model).logits
    assert not torch.equal(before, in_place)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() / 2)
    torch.testing.assert_close(one_token(model).logits, before)
    layer.weight.data = layer.weight.data * 2
    torch.testing.assert_close(one_token(model).logits, in_place)


def test_arguments_that_change_the_block_are_heard(seed: int) -> None:
    model = fused("llama", seed)
    with Counted() as counted:
        states = one_token(model, output_hidden_states=True).hidden_states
    assert len(states) == 3 and counted.left <= 4
    model.set_attn_implementation("eager")
    with Counted() as counted:
        assert len(one_token(model, output_attentions=True).attentions) == 2
    assert counted.computed == 0
    ids = torch.tensor([[5]])
    model.set_attn_implementation("sdpa")
    with Counted() as counted:
        cache = DynamicCache()
        model(ids, **{generation_name(): cache}).logits.sum().backward()  # with gradients
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(ids, **{generation_name(): cache})
    assert counted.computed == 0 and model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_copies_compute_with_their_own_weights(seed: int) -> None:
    model = fused("llama", seed)
    expected = one_token(model).logits
    other = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    torch.testing.assert_close(one_token(other).logits, expected)
    plain = one_token(other.unfuse())
    torch.testing.assert_close(plain.logits, expected, rtol=1e-5, atol=1e-5)
    assert not any("decoding" in module.__dict__ for module in other.modules())


def test_a_changed_narrow_weight_is_named(seed: int) -> None:
    weights = drawn_weights("llama", seed)
    model = parallel_model(zoo.lm_head("llama"), config_of("llama"), weights, 1, dtype=torch.float32).eval()
    model.fuse(weights="int8", measure=False)
    one_token(model)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="has changed since fuse"):
        one_token(model)


# Measurements ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[float, float]]:
    """Replace the measured seconds."""
    seconds: dict[int, tuple[float, float]] = {1: (1e-3, 2e-3), 2: (1e-3, 1.1e-3), 4: (2e-3, 1e-3), 8: (1e-3, 2e-3)}
    monkeypatch.setattr(block_timing, "_time", lambda *_: seconds)
    monkeypatch.setattr(block_timing, "_kept", block_timing.KeptTimings(in_file=False))
    return seconds


def test_rows_for_which_it_is_slower_are_left_to_torch(measured: Any, seed: int) -> None:
    weights = drawn_weights("llama", seed)
    model = parallel_model(zoo.lm_head("llama"), config_of("llama"), weights, 1, dtype=torch.float32).eval()
    model.fuse()
    for rows in (1, 2, 3, 4, 8):
        with Counted() as counted:
            logits_of(model, seed, rows=rows)
        assert bool(counted.computed) == (rows in (1, 2, 8)), rows
    report = str(model.fusion_report())
    assert "1 row: 1000 vs 2000 us" in report and "(4 rows: 2000 vs 1000 us)" in report
    threads = torch.get_num_threads()
    torch.set_num_threads(3)  # nothing was measured for them
    try:
        with Counted() as counted:
            one_token(model)
        assert counted.computed == 0
    finally:
        torch.set_num_threads(threads)


def test_blocks_that_are_slower_are_not_fused(measured: Any, seed: int) -> None:
    measured.update(dict.fromkeys(measured, (2e-3, 1e-3)))
    weights = drawn_weights("gpt2", seed)
    model = parallel_model(zoo.lm_head("gpt2"), config_of("gpt2"), weights, 1, dtype=torch.float32).eval()
    row = next(row for row in model.fuse().fusion_report() if row.operation == "block")
    assert not row.fused and "slower" in row.reason


def check_timing(weights: dict[str, Tensor], seed: int, ranks: int) -> None:
    model = parallel_model(zoo.lm_head("llama"), config_of("llama"), weights, ranks, dtype=torch.float32).train()
    state = torch.get_rng_state()
    with mock.patch.object(block_timing, "_kept", block_timing.KeptTimings(in_file=False)):
        model.fuse()
    assert torch.equal(torch.get_rng_state(), state) and all(module.training for module in model.modules())
    row = next(row for row in model.fusion_report() if row.operation == "block")
    assert " us" in row.reason and row.modules == 2
    logits_of(model.eval(), seed)


def test_time_is_taken_on_all_ranks(pool: Pool, seed: int) -> None:
    check_timing(drawn_weights("llama", seed), seed, 1)
    pool.run(2, check_timing, drawn_weights("llama", seed), seed, 2)


# Mistakes -------------------------------------------------------------------------------------------------------------

MISTAKES = [
    Edit("fusion.decoder_blocks:BlockDecoding._run", "(mask, None)", "(None, None)"),
    Edit("fusion.decoder_blocks:BlockDecoding._run", "(groups, heads + groups)", "(groups, heads)"),
    Edit("fusion.decoder_blocks:BlockDecoding._run", "attention.layer_idx", "0"),
    Edit("fusion.decoder_layers:_norm_of", "norm.variance_epsilon, norm.offset", "norm.variance_epsilon, 0.0"),
    Edit("fusion.decoder_layers:_layer_of", "LinearWeights(weight, bias, None,", "LinearWeights(weight, None, None,"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda edit: edit.new)
def test_mistakes_are_caught(mistake: Edit, seed: int) -> None:
    def check() -> None:
        for variant in ("gemma", "llama"):
            check_logits(variant, drawn_weights(variant, seed), seed, 1, check=False)

    with pytest.raises((AssertionError, RuntimeError)):
        with_mutant(mistake, check)


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b * cos[half + i] + a * sin[half + i]", "b * cos[half + i] - a * sin[half + i]"),
        ("x[at] + step.part[at]", "step.part[at]"),
        ("0.044715f", "0.044f"),
        ("from[i] * from[columns + i]", "from[i] + from[columns + i]"),
        ("apply(block.key_norm, keys", "apply(block.query_norm, keys"),
        ("if (const int64_t code = sum(step, block)) return next(2, code);", ""),
    ],
)
def test_mistakes_in_the_source_are_caught(old: str, new: str, tmp_path: Path, pool: Pool, seed: int) -> None:
    for source in build.SOURCES.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    source = tmp_path / "decoder_block.cpp"
    assert source.read_text().count(old) == 1
    source.write_text(source.read_text().replace(old, new))
    with pytest.raises(WorkerError, match="AssertionError"):
        for variant in ("gpt2", "qwen3"):
            pool.run(2, check_source, tmp_path, variant, drawn_weights(variant, seed), seed)


def check_source(sources: Path, *args: Any) -> None:
    """Run `check_logits` on two ranks with changed sources."""
    decoder_block._library.cache_clear(), build.load.cache_clear()
    try:
        with mock.patch.object(build, "SOURCES", sources):
            decoder_block._library()
        check_logits(*args, 2)
    finally:
        decoder_block._library.cache_clear(), build.load.cache_clear()
