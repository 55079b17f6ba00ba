"""Rows of the running batch in parts by length: the tokens of one part, in less memory."""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from oslo_kernels import decoder_block
from oslo_models import GPT2LMHeadModel, registry
from oslo_models.deploy.messages import Reused
from oslo_models.deploy.running_batch import admission, slot_parts
from oslo_models.deploy.running_batch.limits import BatchLimits, columns
from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.deploy.running_batch.slot_parts import PartedSlots, reason_against_parts, sizes_of_parts
from oslo_models.deploy.running_batch.step import Step
from oslo_models.deploy.running_batch.step_runner import StepRunner
from oslo_models.fusion.attention_parts import PartStates

from support import deployment, running, zoo
from support.batch_loop import Application, greedy, request
from support.float64 import lifted_casts
from support.pool import Pool

LENGTH, ROWS = 60, 4


# The cache ------------------------------------------------------------------------------------------------------------


def filled(tokens: list[float]) -> SlotCache:
    """Return a cache with one row whose keys and values are its tokens."""
    given = SlotCache(1, LENGTH)
    given.lengths = [0]
    given.make_room(1, len(tokens))
    given.update(*[torch.tensor(tokens).view(1, 1, -1, 1)] * 2, 0)
    given.grow(len(tokens))
    return given


def step(cache: Any, rows: list[list[float]], states: Tensor) -> None:
    """Append new positions to all rows of a cache. Check what the attention of each row sees."""
    width = states.shape[2]
    cache.make_room(len(rows), width)
    order = cache.order or [*range(len(rows))]
    mask_BL = cache.mask(width, torch.tensor([cache.lengths[slot] for slot in order]))
    keys, values = cache.update(states[order], states[order], 0)
    parts = keys.parts if isinstance(keys, PartStates) else [keys]
    total = cache.get_mask_sizes(width, 0)[0]
    assert max(part.shape[2] for part in parts) == total and sum(map(len, parts)) == len(rows)
    seen = [row[0, :, 0] for part in parts for row in part]
    for at, (slot, own) in enumerate(zip(order, seen, strict=True)):
        shown = own if mask_BL is None else own[mask_BL[at, total - len(own) :].bool()]
        assert shown.tolist() == rows[slot] + states[slot].flatten().tolist()
    others = values.parts if isinstance(values, PartStates) else [values]
    assert all(torch.equal(key, value) for key, value in zip(parts, others, strict=True))


def test_parts_keep_the_positions_of_each_row(seed: int) -> None:
    """Rows and former rows join, leave, are copied, displaced and moved; they keep any number of new positions."""
    rng, number, counts = random.Random(seed), 0, Counter[str]()
    with running.short_parts():
        for keeps in (True, False) * 12:
            cache = PartedSlots(ROWS, LENGTH, keeps)
            rows: list[list[float]] = []
            former: dict[int, list[float]] = {}
            for _ in range(120):
                action = rng.choice(("join", "leave", "copy", "reuse", "forget", "cut", *["step"] * 8))
                if action == "join" and len(rows) < ROWS:
                    tokens = [float(number + place) for place in range(rng.choice((rng.randint(1, 6), 20, 40)))]
                    number += len(tokens)
                    displaced = rng.choice((-1, *range(len(rows) + 1, ROWS)))
                    if (moved := former.pop(len(rows), None)) is not None and displaced >= 0:
                        former[displaced] = moved
                        counts["displaced"] += 1
                    cache.append(filled(tokens).layers, 0, len(tokens), len(tokens), displaced)
                    rows.append(tokens)
                elif action == "leave" and rows:
                    slot = rng.randrange(len(rows))
                    gone, rows[slot] = rows[slot], rows[-1]
                    rows.pop()
                    cache.free(slot)
                    if keeps:
                        former[len(rows)] = gone
                elif action == "copy" and rows and len(rows) < ROWS and not former:
                    slot = rng.randrange(len(rows))
                    cache.fork(slot, 1)
                    rows.append(rows[slot])
                elif action == "reuse" and [*rows, *former]:
                    known = dict(enumerate(rows)) | former
                    slot = rng.choice([*known])
                    length, given = rng.randint(1, len(known[slot])), SlotCache(1, LENGTH)
                    given.begin_with(cache, slot, length)
                    begun = given.layers[0].keys[0, 0, : given.stop, 0]  # type: ignore[union-attr]
                    assert begun[-length:].tolist() == known[slot][:length]
                elif action == "forget" and rng.random() < 0.1:
                    cache.forget()
                    former.clear()
                elif action == "cut" and rows and rng.random() < 0.3:
                    fewer = [rng.randint(0, min(2, len(known) - 1)) for known in rows]
                    cache.cut(fewer)
                    rows = [known[: len(known) - count] for known, count in zip(rows, fewer, strict=True)]
                elif action == "step" and rows:
                    width = rng.choice((1, 1, 2, 5))
                    states = torch.arange(number, number + len(rows) * width).float().view(len(rows), 1, width, 1)
                    number += states.numel()
                    step(cache, rows, states)
                    kept = [min(rng.randint(0, width), LENGTH - len(known)) for known in rows]
                    cache.settle(kept)
                    new = [own.flatten().tolist()[:count] for own, count in zip(states, kept, strict=True)]
                    rows = [known + own for known, own in zip(rows, new, strict=True)]
                    counts["parts"] += cache.order is not None
                    counts["lags"] += bool(cache.lags)
                assert cache.lengths == list(map(len, rows))
                known = dict(enumerate(rows)) | former
                assert set(cache._places) == set(known)
                for slot, tokens in known.items():
                    part, own = cache.located(slot)
                    begin = part.begin(own)
                    held = part.layers[0].keys[own, 0, begin : begin + len(tokens), 0]  # type: ignore[union-attr]
                    assert held.tolist() == tokens
            like = filled([1.0])
            flat = cache.reserved(like)
            assert flat.lengths == cache.lengths and flat.bytes_held == 2 * 4 * ROWS * columns(LENGTH)
            for slot, tokens in known.items():
                begin = flat.begin(slot)
                assert flat.layers[0].keys[slot, 0, begin : begin + len(tokens), 0].tolist() == tokens  # type: ignore[union-attr]
    assert min(counts[each] for each in ("displaced", "parts", "lags")) > 10, counts


def drawn_lengths(rng: random.Random, count: int = 32, least: int = 32, most: int = 4096) -> list[int]:
    """Lengths with logarithms of equal probability."""
    return [round(math.exp(rng.uniform(math.log(least), math.log(most)))) for _ in range(count)]


@pytest.mark.parametrize("draw", range(4))
def test_rows_of_mixed_lengths_take_half_of_reserved_slots(draw: int) -> None:
    lengths = drawn_lengths(random.Random(draw))
    cache, prompt = PartedSlots(32, 4096), SlotCache(1, 4096)
    prompt.lengths = [0]
    prompt.make_room(1, 4096)
    prompt.update(*[torch.zeros(1, 1, 4096, 2)] * 2, 0)
    prompt.grow(4096)
    for length in lengths:
        cache.append(prompt.layers, 0, 4096, length)
    reserved = cache.reserved(prompt).bytes_held
    assert reserved == 2 * 4 * 2 * 32 * columns(4096)
    assert cache.bytes_held <= 0.5 * reserved
    assert cache.bytes_held <= 2.2 * 2 * 4 * 2 * sum(lengths)
    one = SlotCache(32, 4096)
    for length in lengths:
        one.append(prompt.layers, 0, 4096, length)
    assert cache.bytes_held <= 0.5 * one.bytes_held
    for _ in range(len(lengths) - 1):
        cache.free(cache.lengths.index(max(cache.lengths)))
    states = torch.zeros(1, 1, 1, 2)
    for _ in range(slot_parts.PATIENCE + 1):
        cache.make_room(1, 1)
        cache.update(states, states, 0)
        cache.grow(1)
    assert cache.bytes_held <= 2 * 4 * 2 * 512


def test_equal_rows_are_one_part_in_their_order() -> None:
    """So their forward is the forward of a `SlotCache`, also after all have moved to the next part."""
    states = torch.arange(3.0).view(3, 1, 1, 1)
    with running.short_parts():
        cache = PartedSlots(3, LENGTH)
        for value in states:
            cache.append(filled([float(value)] * 5).layers, 0, 5, 5)
        for _ in range(50):
            cache.make_room(3, 1)
            keys, _ = cache.update(states, states, 0)
            assert isinstance(keys, Tensor) and cache.order is None and torch.equal(keys[:, :, -1:], states)
            cache.grow(1)
        assert [len(part.slots) for part in cache._parts] == [0, 0, 0, 3, 0]


def test_sizes_of_parts() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "deployment.md"
    assert f"{len(slot_parts.TYPES)} types" in " ".join(guide.read_text().split())
    assert sizes_of_parts(4096) == [512, 1024, 2048, 4096, 4608]
    assert sizes_of_parts(448) == [512] and sizes_of_parts(100) == [164] and sizes_of_parts(455) == [512, 519]


# The model ------------------------------------------------------------------------------------------------------------


def model_and_whole(attention: str, seed: int, fused: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    config = zoo.config("llama", attn_implementation=attention)
    whole = transformers.LlamaForCausalLM(config).double().eval()
    cls: Any = registry.find("LlamaForCausalLM")
    model = cls.from_config_with_parallel(config, dtype=torch.float64).eval()
    model.load_state_dict(whole.state_dict())
    return (model.fuse() if fused else model), whole


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_rows_of_mixed_lengths_have_their_own_logits(seed: int, attention: str, fused: bool) -> None:
    """With and without drafts, while rows grow from part to part, leave and are reused."""
    model, whole = model_and_whole(attention, seed, fused)
    draw, several = torch.Generator().manual_seed(seed), 0
    rows: list[list[int]] = []

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 90, (count,), generator=draw).tolist()

    def check(logits: Any, row: list[int], end: int) -> None:
        expected_LV = whole(torch.tensor([row])).logits[0]
        torch.testing.assert_close(logits, expected_LV[end - 1], rtol=1e-10, atol=1e-10)

    with running.short_parts(), lifted_casts():
        runner = StepRunner(model, BatchLimits(5, LENGTH, LENGTH, drafted=2))
        assert isinstance(runner.rows, PartedSlots)
        for length in (3, 37, 9, 20, 4):
            rows.append(tokens(length))
            check(runner.run(Step(0, chunk=rows[-1], begins=True, joins=True))[0], rows[-1], length)  # type: ignore[index]
        settled: list[int] = []
        for number in range(18):
            drafts = [tokens(index % 3) for index in range(len(rows))] if number % 3 == 1 else []
            new = [tokens(1) for _ in rows]
            given = Step(0, tokens=[one for (one,) in new], drafts=drafts, settled=settled)
            logits = runner.run(given)
            several += runner.rows.order is not None
            assert logits is not None
            for index, row in enumerate(rows):
                row += new[index] + (drafts[index] if drafts else [])
                for place in range(1 + (len(drafts[index]) if drafts else 0)):
                    own = logits[index, place] if drafts else logits[index]
                    check(own, row, len(row) - (len(drafts[index]) if drafts else 0) + place)
            settled = [1 + len(draft) for draft in drafts]
            if number == 9:
                step = Step(0, leaving=[1], settled=settled, chunk=tokens(3), begins=True, source=4, reused=30)
                step.joins, former, settled = True, rows[1], []
                rows[1] = rows[-1]
                rows[-1] = [*former[:30], *step.chunk]
                check(runner.run(step)[0], rows[-1], 33)  # type: ignore[index]
    assert several > 15


@pytest.mark.parametrize("groups", [1, 2])
def test_loop_reuses_prefixes_of_rows_in_parts(pair: Any, seed: int, groups: int) -> None:
    """Chats whose turns grow from part to part, beside other calls; between them, the memory is reserved."""
    model, whole = pair
    rng = random.Random(seed)
    calls = running.requests(rng, 16)
    chat, text = list[dict[str, Any]](), greedy(seed, 3, 9)["input_ids"]
    for turn in range(4):
        call = greedy(seed + turn, 6, 5)
        text = torch.cat((text, call["input_ids"]), 1)
        chat.append({**call, "input_ids": text, "attention_mask": torch.ones_like(text)})
        text = running.alone(whole, {"seed": 0, **chat[-1]})
    with running.short_parts():
        application = Application(model, BatchLimits(6, 64, 16), groups)
        for number, call in enumerate(calls):
            application.send(rng.randrange(40), request(number, call))
        for turn, call in enumerate(chat):
            application.send(20 + 15 * turn, request(100 + turn, call))
        application.run()
        runners = application.batch.runners
        assert all(isinstance(runner.rows, PartedSlots) for runner in runners)
        application.batch.reserve()
        assert all(isinstance(runner.rows, SlotCache) for runner in runners)
        application.send(0, request(200, chat[-1]))
        application.run()
    for number, call in (*enumerate(calls), *enumerate(chat, 100), (200, chat[-1])):
        assert torch.equal(application.answer(number).result, running.alone(whole, {"seed": 0, **call}))
    reused = [each.tokens for each in application.sent if isinstance(each, Reused)]
    assert max(reused) > 30 and reused[-1] == chat[-1]["input_ids"].shape[1] - 1


MORE = ("bloom", "cohere2", "falcon", "gemma2", "gpt_oss", "mixtral", "mpt", "olmo3")
OTHERS = [pytest.param(each, marks=pytest.mark.zoo) for each in MORE]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "deepseek_v3", *OTHERS])
def test_calls_get_their_own_tokens(pool: Pool, tmp_path: Path, seed: int, variant: str, sizes: dict[str, int]) -> None:
    """Rows join, leave and are reused in any order, on several ranks."""
    running.compare(pool, variant, tmp_path, seed, parts=True, **sizes)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_calls_with_drafts_get_their_own_tokens(pool: Pool, tmp_path: Path, seed: int, sizes: dict[str, int]) -> None:
    running.compare(pool, "llama", tmp_path, seed, limits=replace(running.LIMITS, drafted=3), parts=True, **sizes)


def decoded(model: Any) -> tuple[Tensor, bool]:
    """Return the logits of some steps, and whether the rows of the last one were in several parts."""
    with lifted_casts():
        runner, made = StepRunner(model, BatchLimits(4, 40, 40)), list[Tensor]()
        for row in ([5, 7, 11], [*range(3, 24)], [9] * 12):
            made.append(runner.run(Step(0, chunk=row, begins=True, joins=True)))  # type: ignore[arg-type]
        for number in range(4):
            made.append(runner.run(Step(0, tokens=[13 + number] * 3)))  # type: ignore[arg-type]
        if admission.reason_against_drafts(model.config, 40) is None:
            logits_BLV = runner.run(Step(0, tokens=[17] * 3, drafts=[[5, 6], [], [7]]))
            assert logits_BLV is not None
            made += [logits_BLV[0], logits_BLV[1, :1], logits_BLV[2, :2]]
            made.append(runner.run(Step(0, tokens=[18] * 3, settled=[3, 1, 2])))  # type: ignore[arg-type]
    return torch.cat(made), runner.rows.order is not None


DECODERS = [each for each in (*zoo.FOUNDING, *zoo.MORE, "falcon-alibi", "falcon-one-kv") if running.is_decoder(each)]
FAST = {"bloom", "deepseek_v3", "falcon-alibi", "mpt"}


@pytest.mark.parametrize(
    "variant", [each if each in FAST else pytest.param(each, marks=pytest.mark.zoo) for each in DECODERS]
)
@torch.no_grad()
def test_decoders_of_the_zoo_attend_by_parts(variant: str, seed: int) -> None:
    """Types in the table do. Their logits are those of rows in one part."""
    torch.manual_seed(seed)
    cls: Any = registry.find(zoo.lm_head(variant))
    config = zoo.config(variant)
    if (reason := admission.reason_against(config)) is not None:
        pytest.skip(reason)
    model = cls.from_config_with_parallel(config, dtype=torch.float64).eval()
    needed = [each for each in inspect.signature(model.forward).parameters.values() if each.default is each.empty]
    if any(each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "input_ids" for each in needed):
        pytest.skip("its forward needs images")
    if (reason := reason_against_parts(model)) is not None:
        pytest.skip(reason)
    expected, _ = decoded(model)
    with running.short_parts():
        found, has_parts = decoded(model)
    assert has_parts
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_blocks_in_cpp_attend_by_parts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused blocks in float32 compute tokens of several parts, too."""
    torch.manual_seed(seed)
    cls: Any = registry.find(zoo.lm_head("llama"))
    model = cls.from_config_with_parallel(zoo.config("llama"), dtype=torch.float32).eval().fuse(measure=False)
    finished, finish = list[bool](), decoder_block.finish

    def noted(packed: bytes, x: Tensor, given: Any, *args: Any) -> Tensor:
        finished.append(isinstance(given, Tensor))  # attention by parts has computed it
        return finish(packed, x, given, *args)

    monkeypatch.setattr(decoder_block, "finish", noted)
    expected, _ = decoded(model)
    if not finished:
        pytest.skip("this CPU computes no blocks in C++")
    assert not any(finished)
    with running.short_parts():
        found, has_parts = decoded(model)
    assert has_parts and any(finished)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_exact_rollouts_are_the_same_bits(seed: int) -> None:
    torch.manual_seed(seed)
    cls: Any = registry.find(zoo.lm_head("llama"))
    model = cls.from_config_with_parallel(zoo.config("llama")).eval().use_exact_rollouts()
    expected, _ = decoded(model)
    with running.short_parts():
        found, has_parts = decoded(model)
    assert has_parts and torch.equal(found, expected)


def test_other_models_are_in_one_part(pair: Any) -> None:
    model, _ = pair
    with running.short_parts():
        assert isinstance(StepRunner(model, BatchLimits(2, 60, 60)).rows, PartedSlots)
        assert isinstance(running.static_runner(model, BatchLimits(2, 60, 60), lambda compute: compute).rows, SlotCache)
    assert isinstance(StepRunner(model, BatchLimits(2, 60, 60)).rows, SlotCache)  # shorter than the first part
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), config=model.config)
    assert "GPU" in (reason_against_parts(on_gpu) or "")
    on_gpu.device, on_gpu.config = torch.device("cpu"), copy.deepcopy(model.config)
    assert reason_against_parts(on_gpu) is None
    on_gpu.config._attn_implementation = "flex_attention"
    assert "'sdpa' or 'eager'" in (reason_against_parts(on_gpu) or "")
    on_gpu.token_division = object()
    assert "divided" in (reason_against_parts(on_gpu) or "")
    bamba: Any = registry.find(zoo.lm_head("bamba"))
    reason = reason_against_parts(bamba.from_config_with_parallel(zoo.config("bamba")))
    assert reason is not None and "states" in reason


def mixed(folder: Path, sizes: dict[str, int], prompts: list[list[int]], options: dict[str, Any]) -> list[Any]:
    """On a rank, return the sequences of `generate_batch` with rows in parts, and with three drafted tokens."""
    model: Any = GPT2LMHeadModel.from_pretrained_with_parallel(folder, dtype=torch.float64, **sizes)
    with running.short_parts():
        found = [model.generate_batch(prompts, **options, speculative_tokens=drafted) for drafted in (None, 3)]
        options = {**options, "do_sample": True, "num_return_sequences": 2}
        torch.manual_seed(3)
        found.append(model.generate_batch(prompts, **options))
    torch.manual_seed(3)
    found.append(model.generate_batch(prompts, **options))
    return [[each.generated_tokens for each in outputs.values()] for outputs in found]


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_batches_of_mixed_lengths_have_the_tokens_of_generate(
    pool: Pool, tmp_path: Path, seed: int, sizes: dict[str, int]
) -> None:
    torch.manual_seed(seed)
    whole: Any = transformers.GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    whole.save_pretrained(tmp_path)
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 90) for _ in range(length)] for length in (2, 50, 9, 21, 4, 30)]
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = [whole.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]
    for plain, drafted, sampled, in_one in pool.run(2, mixed, tmp_path, sizes, prompts, options):
        assert plain == drafted == expected and sampled == in_one
