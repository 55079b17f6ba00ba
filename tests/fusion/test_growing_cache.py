"""The key-value cache that grows in place: it holds transformers' tensors after any operation."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPT2Config
from transformers.cache_utils import EncoderDecoderCache

from oslo_models import GPT2LMHeadModel, LlamaForCausalLM
from oslo_models.cache_argument import generation_name
from oslo_models.fusion import growing_cache
from oslo_models.fusion.growing_cache import GrowingLayer, let_grow

from support import zoo
from support.mutants import Edit, with_mutant


@torch.no_grad()
def check_operations(seed: int) -> None:
    """Apply random operations to transformers' cache and to ours, including copies that continue separately."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    config = GPT2Config(n_layer=2)
    pairs = [(DynamicCache(config=config), DynamicCache(config=config))]
    let_grow(pairs[0][1])
    assert all(type(layer) is GrowingLayer for layer in pairs[0][1].layers)
    for _ in range(40):
        plain, ours = rng.choice(pairs)
        operation = rng.choice(("update", "update", "update", "crop", "select", "repeat", "reorder", "reset", "copy"))
        if not plain.layers[0].is_initialized and operation != "copy":
            operation = "update"
        rows = len(plain.layers[0].keys) if plain.layers[0].is_initialized else 2
        for cache in (plain, ours):
            state = rng.getstate()
            drawn = torch.get_rng_state()
            if operation == "update":
                length = rng.choice((1, 1, 1, 7, 90))
                for index in range(2):
                    key, value = torch.randn(rows, 3, length, 5), torch.randn(rows, 3, length, 5)
                    cache.update(key, value, index)
            elif operation == "crop" and cache.get_seq_length() > 1:
                cache.crop(-1)
            elif operation == "select":
                cache.batch_select_indices(torch.tensor([rng.randrange(rows)] * 2))
            elif operation == "repeat" and rows < 5:
                cache.batch_repeat_interleave(2)
            elif operation == "reorder":
                cache.reorder_cache(torch.tensor([rng.randrange(rows) for _ in range(rows)]))
            elif operation == "reset":
                cache.reset()
            if cache is plain:
                rng.setstate(state)
                torch.set_rng_state(drawn)
        if operation == "copy" and len(pairs) < 4:
            pairs.append((copy.deepcopy(plain), copy.deepcopy(ours)))
        for one, other in pairs:
            assert one.get_seq_length() == other.get_seq_length()
            for mine, theirs in zip(other.layers, one.layers, strict=True):
                assert mine.is_initialized == theirs.is_initialized
                if mine.is_initialized:
                    assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)


@pytest.mark.parametrize("shift", range(5))
def test_operations_give_the_tensors_of_transformers(seed: int, shift: int) -> None:
    check_operations(seed + shift)


LAYER = "fusion.growing_cache:GrowingLayer"
MISTAKES = [
    Edit(f"{LAYER}.update", "not is_own or ", ""),
    Edit(f"{LAYER}.update", "keys.narrow(-2, 0, stop)", "keys"),
    Edit(f"{LAYER}._allocate", "if length:", "if False:"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda edit: edit.old)
def test_mistakes_are_caught(mistake: Edit) -> None:
    def check_many() -> None:
        for seed in range(10):
            check_operations(seed)

    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        with_mutant(mistake, check_many)


@torch.no_grad()
def test_memory_is_allocated_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, calls = DynamicCache(config=GPT2Config(n_layer=1)), []
    let_grow(cache)
    allocate = GrowingLayer._allocate
    monkeypatch.setattr(GrowingLayer, "_allocate", lambda *args: calls.append(args[-1]) or allocate(*args))
    for _ in range(600):
        cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    assert len(calls) <= 10 and cache.layers[0]._memory[0].shape[-2] < 600 + growing_cache.LEAST_SPARE + 600 // 8


def test_gradients_flow_through_former_positions(seed: int) -> None:
    torch.manual_seed(seed)
    keys = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    found = []
    for grows in (False, True):
        cache = DynamicCache(config=GPT2Config(n_layer=1))
        if grows:
            let_grow(cache)
        total = torch.zeros(())
        for key in keys:
            total = total + cache.update(key, 2 * key, 0)[0].pow(3).sum()
        found.append(torch.autograd.grad(total, keys))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("cls", [LlamaForCausalLM, GPT2LMHeadModel])
def test_fused_models_generate_with_it(cls: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled generation use it. Beams, which replace the cache at each token, and unfused models do not."""
    name = {LlamaForCausalLM: "llama", GPT2LMHeadModel: "gpt2"}[cls]
    model: Any = cls.from_config_with_parallel(zoo.config(name), seed=seed, dtype=torch.float64).eval()
    ids = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(seed))
    updates: list[int] = []
    update = GrowingLayer.update
    monkeypatch.setattr(GrowingLayer, "update", lambda *args, **more: updates.append(1) or update(*args, **more))

    def generate(**options: Any) -> Any:
        torch.manual_seed(seed)
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0, **options)

    ways: list[dict[str, Any]] = [{"do_sample": False}, {"do_sample": True}, {"do_sample": False, "num_beams": 2}]
    expected = [generate(**way) for way in ways]
    assert not updates
    model.fuse()
    for way, right in zip(ways, expected, strict=True):
        updates.clear()
        assert torch.equal(generate(**way), right) and bool(updates) is ("num_beams" not in way)


@pytest.mark.parametrize("first", [True, False])
def test_cache_goes_on_in_and_out_of_inference_mode(seed: int, first: bool) -> None:
    """A later turn of a chat continues the cache of an earlier turn."""
    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), seed=seed, dtype=torch.float64).eval()
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **{**options, "max_new_tokens": 8})
    model.fuse()
    with torch.inference_mode(first):
        turn = model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **options)
        assert type(getattr(turn, generation_name()).layers[0]) is GrowingLayer
    with torch.inference_mode(not first):
        so_far = turn.sequences.clone()
        cached = {generation_name(): getattr(turn, generation_name())}
        found = model.generate(so_far, attention_mask=torch.ones_like(so_far), **cached, **options)
    assert torch.equal(found, expected)


def test_other_caches_stay_as_they_are() -> None:
    config = GPT2Config(n_layer=1)
    pair = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    let_grow(pair)
    assert type(pair.self_attention_cache.layers[0]) is GrowingLayer
    assert type(pair.cross_attention_cache.layers[0]) is not GrowingLayer
    offloaded, filled = DynamicCache(config=config), DynamicCache(config=config)
    offloaded.offloading = True  # the argument would create a stream, and torch may need a GPU for it
    filled.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    for cache in (offloaded, filled, None):
        let_grow(cache)
    assert not any(type(layer) is GrowingLayer for cache in (offloaded, filled) for layer in cache.layers)
