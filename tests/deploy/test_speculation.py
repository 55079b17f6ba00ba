"""Drafted tokens in the running batch: every call gets the tokens that it gets without them, in fewer steps."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from oslo_models import GPT2LMHeadModel, registry
from oslo_models.deploy.decoding import Decoding
from oslo_models.deploy.messages import Failure, Request, Speculated
from oslo_models.deploy.running_batch import admission, graphs, loop, speculation
from oslo_models.deploy.running_batch.limits import BatchLimits, columns
from oslo_models.deploy.running_batch.row import Row
from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.deploy.running_batch.speculation import REST, Acceptance, Drafts, DraftSpeed, PromptLookup, going_on
from oslo_models.deploy.running_batch.static_step import run_eagerly
from oslo_models.deploy.running_batch.step import Step, WholePrompt
from oslo_models.deploy.running_batch.step_runner import StepRunner

from support import deployment, running, zoo
from support.batch_loop import Application, greedy, request
from support.deployment import prompt
from support.float64 import lifted_casts
from support.guesses import Guesses
from support.pool import Pool

pytestmark = pytest.mark.drawn(10, of="file")

LIMITS = BatchLimits(3, 64, 4, drafted=4)
NO_TOKEN = 200
"""An end token outside of the vocabulary, so that no processor bans a token that is drafted."""


# Drafts ---------------------------------------------------------------------------------------------------------------


def last_continuation(tokens: list[int], most: int) -> list[int]:
    """The tokens after the last earlier occurrence of the last three tokens, or else of the last two."""
    for size in speculation.SIZES:
        for start in reversed(range(len(tokens) - size)):
            if tokens[start : start + size] == tokens[-size:]:
                found = [*tokens]
                for place in range(most):
                    found.append(found[start + size + place])
                return found[len(tokens) :]
    return []


def test_lookup_finds_the_last_occurrence(seed: int) -> None:
    rng, drafted = random.Random(seed), 0
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(20))]
        lookup, left = PromptLookup(), [*tokens]
        while left:
            count = rng.randint(1, len(left))
            lookup.extend(left[:count])
            left = left[count:]
        most = rng.randint(1, 6)
        expected = last_continuation(tokens, most)
        assert lookup.draft(most) == expected
        drafted += bool(expected)
    assert drafted > 50


def test_images_are_not_drafted() -> None:
    lookup = PromptLookup()
    lookup.extend([1, 2, 3, 4, -7, -7, 1, 2, 3])
    assert lookup.draft(5) == [4]


def test_rows_with_few_accepted_tokens_pause_for_longer_and_longer() -> None:
    acceptance, pauses, began = Acceptance(), list[int](), 0
    for count in range(20 * REST):
        if acceptance.allows(count):
            if began:
                pauses.append(count - began)
            acceptance.note(4, 0, count)
            began = 0
        elif not began:
            began = count
    assert pauses[0] in (REST, REST - 1) and pauses[1] - pauses[0] == REST and len(pauses) >= 3
    good = Acceptance()
    for count in range(500):
        good.note(4, 2, count)
        assert good.allows(count + 1)


def test_step_has_drafts_if_half_of_its_positions_have_tokens() -> None:
    """Otherwise, rows without a draft would be padded for the others."""
    repeats, other = [5, 6, 7, 5, 6, 7, 5], [1, 2, 3, 4]
    for others, drafts in ((1, True), (2, False)):
        rows = [
            SimpleNamespace(keys=keys, new=[keys[-1]], ended=False, room=9.0, speculation=None)
            for keys in [[*repeats[:-1], 5, 6]] + [other] * others
        ]
        rows[0].new = [7]
        found = Drafts(4).draft(rows)
        assert bool(found) is drafts
        if drafts:
            assert found == [[5, 6, 7, 5], []]
    rows[0].room = 3.0
    assert Drafts(4).draft(rows[:1]) == [[5, 6]]  # the row gets one more token than drafted ones
    rows[0].room = 1.0
    assert Drafts(4).draft(rows[:1]) == []


# The cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
def test_cache_keeps_the_positions_of_each_row(seed: int, static: bool) -> None:
    """Rows keep any number of the positions of a step, join, leave, are copied and move in memory."""
    rng, number, lagged = random.Random(seed), 0, 0
    for _ in range(25):
        cache, given = SlotCache(4, 30, keeps=True, is_static=static), SlotCache(1, 30)
        rows: list[list[float]] = []
        for _ in range(40):
            action = rng.choice(("join", "leave", "copy", "step", "step", "step"))
            if action == "join" and len(rows) < 4:
                tokens = [float(number + place) for place in range(rng.randint(1, 12))]
                number += len(tokens)
                given.clear()
                given.lengths = [0]
                given.make_room(1, len(tokens))
                given.update(*[torch.tensor(tokens).view(1, 1, -1, 1)] * 2, 0)
                given.grow(len(tokens))
                cache.append(given.layers, 0, given.stop, len(tokens))
                rows.append(tokens)
            elif action == "leave" and rows:
                slot = rng.randrange(len(rows))
                gone, rows[slot] = rows[slot], rows[-1]
                rows.pop()
                cache.free(slot)
                length = rng.randint(1, len(gone))
                given.begin_with(cache, len(rows), length)
                begun = given.layers[0].keys[0, 0, : given.stop, 0]  # type: ignore[union-attr]
                assert begun[-length:].tolist() == gone[:length]
            elif action == "copy" and rows and len(rows) < 4:
                slot = rng.randrange(len(rows))
                cache.fork(slot, 1)
                rows.append(rows[slot])
            elif action == "step" and rows:
                width = rng.choice((1, 1, 2, 5))
                states = torch.arange(number, number + len(rows) * width).double().view(len(rows), 1, width, 1)
                number += states.numel()
                cache.make_room(len(rows), width)
                mask_BL = cache.mask(width, torch.tensor(cache.lengths))
                keys, values = cache.update(states.float(), states.float(), 0)
                assert torch.equal(keys, values) and keys.shape[2] == cache.get_mask_sizes(width, 0)[0]
                for slot, known in enumerate(rows):
                    own = keys[slot, 0, :, 0]
                    own = own if mask_BL is None else own[mask_BL[slot].bool()]
                    assert own.tolist() == known + states[slot].flatten().tolist()
                counts = [min(rng.randint(0, width), 30 - len(known)) for known in rows]
                cache.settle(counts)
                rows = [
                    known + states[slot].flatten().tolist()[:count]
                    for slot, (known, count) in enumerate(zip(rows, counts, strict=True))
                ]
                lagged += bool(cache.lags)
            assert cache.lengths == list(map(len, rows))
            assert not rows or len(cache.lags) < len(rows)
            assert max(cache.window, cache.columns) <= columns(30)
    assert lagged > 50


def test_rows_that_lag_far_are_aligned_again() -> None:
    """Otherwise, every step would attend to the empty columns."""
    cache, states = SlotCache(2, 2000), torch.zeros(2, 1, 3, 1)
    cache.make_room(2, 3)
    cache.lengths = [0, 0]
    windows = []
    for _ in range(200):
        cache.make_room(2, 3)
        cache.update(states, states, 0)
        cache.settle([3, 1])
        windows.append(cache.window - max(cache.lengths))
    assert cache.lengths == [600, 200] and max(windows) == 0
    for _ in range(400):
        cache.make_room(2, 3)
        cache.update(states, states, 0)
        cache.settle([1, 3])
        windows.append(cache.window - max(cache.lengths))
    assert cache.lengths == [1000, 1400] and 40 < max(windows) <= columns(1400) - 1400


@pytest.mark.parametrize("static", [False, True])
def test_steps_after_drafts_have_the_logits_of_the_kept_tokens(pair: Any, static: bool) -> None:
    model, whole = pair
    limits = BatchLimits(2, 64, 64, drafted=2)
    runner = running.static_runner(model, limits, run_eagerly) if static else StepRunner(model, limits)
    runner.run(Step(0, whole=[WholePrompt(0, 3, -1), WholePrompt(1, 2, -1)], chunk=[3, 4, 5, 6, 7]))
    rows = [[3, 4, 5, 8], [6, 7, 9, 10, 11]]
    runner.run(Step(0, tokens=[8, 9], drafts=[[12, 13], [10, 11]]))  # the first row keeps one position, the other three
    for number in range(3):
        tokens = [20 + number, 30 + number]
        logits_BV = runner.run(Step(0, tokens=tokens, settled=[1, 3] if number == 0 else []))
        for row, token, logits_V in zip(rows, tokens, logits_BV, strict=True):
            row.append(token)
            torch.testing.assert_close(logits_V, whole(torch.tensor([row])).logits[0, -1], rtol=1e-10, atol=1e-10)
    assert runner.rows.lags == {0: 2} and runner.rows.lengths == [7, 8]


# The loop -------------------------------------------------------------------------------------------------------------


def guessing(
    model: Any, whole: Any, calls: list[dict[str, Any]], rng: random.Random, groups: int = 1, **options: Any
) -> tuple[Application, list[Tensor], list[Guesses]]:
    """Return the loop with drafts for calls, the results of plain transformers, and the drafts."""
    expected = [running.alone(whole, {"seed": 0, **call}) for call in calls]

    def answer(row: Any) -> list[int]:
        (index,) = (i for i, own in enumerate(application.batch._calls[row.number].rows) if own is row)
        found: list[int] = expected[row.number][index, calls[row.number]["input_ids"].shape[1] :].tolist()
        return found

    application = Application(model, LIMITS, groups)
    made = [Guesses(LIMITS.drafted, rng, answer, **options) for _ in range(groups)]
    for scheduler, drafts in zip(application.batch._slots._schedulers, made, strict=True):
        scheduler.drafts = drafts
    return application, expected, made


@pytest.mark.parametrize("groups", [1, 2])
def test_calls_get_their_own_tokens(pair: Any, seed: int, groups: int) -> None:
    """Greedy and sampled calls, with penalties and minimum lengths; streams get each token once, in order."""
    model, whole = pair
    rng = random.Random(seed)
    calls = running.requests(rng, 24)
    application, expected, drafts = guessing(model, whole, calls, rng, groups)
    for number, call in enumerate(calls):
        application.send(rng.randrange(30), request(number, call, len(call["input_ids"]) == 1))
    application.run()
    for number, (call, right) in enumerate(zip(calls, expected, strict=True)):
        assert torch.equal(application.answer(number).result, right)
        if len(right) == 1:
            length = call["input_ids"].shape[1]
            assert application.streamed(number) == [call["input_ids"].tolist(), *right[0, length:].tolist(), None]
    assert all(sum(map(bool, each.widths)) > 3 for each in drafts)
    reported = [each for each in application.sent if isinstance(each, Speculated)]
    assert 0 < sum(each.accepted for each in reported) < sum(each.drafted for each in reported)


def test_right_drafts_save_steps_and_end_where_the_answer_ends(pair: Any, seed: int) -> None:
    """The end token and the last token lie among the drafted ones. Streams get nothing after them."""
    model, whole = pair
    plain = [greedy(seed + number, 12, pad_token_id=0) for number in range(3)]
    first = [running.alone(whole, {"seed": 0, **call})[0, 7:].tolist() for call in plain]
    calls = [{**plain[0], "min_new_tokens": 0, "eos_token_id": first[0][5]}, plain[1]]
    calls.append({**plain[2], "min_new_tokens": 9, "max_new_tokens": 9})
    application, expected, _ = guessing(model, whole, calls, random.Random(seed), wrong=0.0, full=True)
    for number, call in enumerate(calls):
        application.send(0, request(number, call, stream=True))
    application.run()
    for number, right in enumerate(expected):
        assert torch.equal(application.answer(number).result, right)
        assert application.streamed(number)[1:] == [*right[0, 7:].tolist(), None]
    assert len(expected[0][0]) < 7 + 12 and len(application.rows) < 12
    assert application.batch.runners[0].rows.lengths == []


class Raises(transformers.LogitsProcessor):
    """Raises for the token after ``length`` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] == self.length:
            raise ZeroDivisionError("of the processor")
        return scores


def test_processor_that_raises_at_a_drafted_token_ends_its_call_only(pair: Any, seed: int) -> None:
    model, whole = pair
    calls = [greedy(seed + number, 12) for number in range(3)]
    application, expected, _ = guessing(model, whole, calls, random.Random(seed), wrong=0.0, full=True)
    for number, call in enumerate(calls):
        raising = {"logits_processor": [Raises(7 + 4)]} if number == 1 else {}
        application.send(0, request(number, {**call, **raising}, stream=True))
    application.run()
    failure = application.answer(1)
    assert isinstance(failure, Failure) and isinstance(failure.error, ZeroDivisionError)
    assert application.streamed(1)[1:] == expected[1][0, 7 : 7 + 4].tolist()
    for number in (0, 2):
        assert torch.equal(application.answer(number).result, expected[number])


def test_call_cancelled_between_drafts_leaves(pair: Any, seed: int) -> None:
    model, whole = pair
    calls = [greedy(seed + number, 30) for number in range(3)]
    application, expected, _ = guessing(model, whole, calls, random.Random(seed), wrong=0.5)
    for number, call in enumerate(calls):
        application.send(0, request(number, call, stream=True))
    application.cancel(6, 1)
    application.run()
    assert application.answer(1).result is None and None not in application.streamed(1)
    for number in (0, 2):
        assert torch.equal(application.answer(number).result, expected[number])


def test_slow_processors_take_fewer_of_the_drafted_tokens(
    pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows wait for the processors of one step, so the rest of the drafted tokens is left out."""
    monkeypatch.setattr(Row, "processed", lambda row, logits_V: setattr(row, "seconds", 0.3) or logits_V)
    model, whole = pair
    calls = [greedy(seed, 12, repetition_penalty=1.0001)]
    application, expected, _ = guessing(model, whole, calls, random.Random(seed), wrong=0.0, full=True)
    application.send(0, request(0, calls[0], stream=True))
    application.run()
    assert torch.equal(application.answer(0).result, expected[0]) and loop.STEP_SECONDS == 0.5
    assert len(application.rows) == 1 + 6  # two tokens in each step after the prompt, of five


class Counts(transformers.LogitsProcessor):
    """Bans other tokens after each call. Each call sees one token more than the call before, as a grammar requires."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        assert self.length in (0, input_ids.shape[1] - 1)
        self.length = input_ids.shape[1]
        scores[:, self.length % 3 :: 3] = -float("inf")
        return scores


def test_processors_with_states_see_each_token_once(pair: Any, seed: int) -> None:
    model, whole = pair
    calls = [greedy(seed + number, 12) for number in range(3)]
    stateful = [
        lambda: {"logits_processor": [Counts()]},
        lambda: {"logits_processor": [Counts()], "do_sample": True},
        dict,
    ]
    expected = [running.alone(whole, {"seed": 5, **call, **made()}) for call, made in zip(calls, stateful, strict=True)]
    application = Application(model, LIMITS)
    rng = random.Random(seed)
    application.batch._slots._schedulers[0].drafts = Guesses(4, rng, lambda row: expected[row.number][0, 7:].tolist())
    for number, (call, made) in enumerate(zip(calls, stateful, strict=True)):
        application.send(0, request(number, {**call, "seed": 5, **made()}))
    application.run()
    for number, right in enumerate(expected):
        assert torch.equal(application.answer(number).result, right)


def test_streams_have_the_log_probabilities_of_each_token(pair: Any, seed: int) -> None:
    model, _ = pair
    calls = [greedy(seed + number, 12, decoding=Decoding(logprobs=2, presence_penalty=0.5)) for number in range(2)]
    streams: list[list[list[Any]]] = []
    for drafted in (0, 4):
        application = Application(model, replace(LIMITS, drafted=drafted))
        if drafted:
            drafts = Guesses(
                drafted, random.Random(seed), lambda row: [scored.token for scored in streams[0][row.number]]
            )
            application.batch._slots._schedulers[0].drafts = drafts
        for number, call in enumerate(calls):
            application.send(0, request(number, call, stream=True))
        application.run()
        streams.append([application.streamed(number)[1:-1] for number in range(2)])
    assert any(drafts.widths) and all(len(stream) == 12 for stream in streams[0])
    for plain, drafted_ in zip(*streams, strict=True):
        assert [each.token for each in plain] == [each.token for each in drafted_]
        for one, other in zip(plain, drafted_, strict=True):
            assert other.logprob == pytest.approx(one.logprob, abs=1e-6)
            assert [token for token, _ in other.top] == [token for token, _ in one.top]


def test_rows_with_drafts_go_on_beside_a_call_that_cannot_join(pair: Any, seed: int) -> None:
    model, whole = pair
    calls = [greedy(seed + number, 20) for number in range(2)]
    application, expected, _ = guessing(model, whole, calls, random.Random(seed))
    for number, call in enumerate(calls):
        application.send(0, request(number, call, stream=True))
    application.send(2, Request(2, "generate", (9,), {}, 0, gives_way=True))
    application.send(4, Request(3, "forward", (), {}, 0))
    application.run()
    for number, right in enumerate(expected):
        assert torch.equal(application.answer(number).result, right)
    assert application.answer(2).result == "generate" and application.answer(3).result == "forward"


def test_prompt_lookup_saves_steps(pair: Any, seed: int) -> None:
    """Sequences that the penalties do not end repeat themselves; drafts of rows that do not are few."""
    model, whole = pair
    application = Application(model, replace(LIMITS, length=200))
    call = greedy(seed, 100)
    application.send(0, request(0, call, stream=True))
    application.run()
    expected = running.alone(whole, {"seed": 0, **call})
    assert torch.equal(application.answer(0).result, expected)
    reported = [each for each in application.sent if isinstance(each, Speculated)]
    accepted = sum(each.accepted for each in reported)
    assert len(application.rows) == 100 - accepted
    new = expected[0, 7:].tolist()
    repeats = Counter(tuple(new[i : i + 3]) for i in range(98)).most_common(1)[0][1]
    assert accepted > 30 or repeats < 10


# The distribution -----------------------------------------------------------------------------------------------------

WORDS, SEQUENCES = 4, 4000


def drawn(table_VV: Tensor, seed: int) -> list[int]:
    """Draw three tokens after the token 0 with a table of logits as the model. The most probable tokens are drafted."""
    config = SimpleNamespace(do_sample=True, _pad_token_tensor=None)
    row = Row(0, torch.tensor([[0]]), [0], seed, ([], [], config, None), torch.device("cpu"))
    while len(row.new) < 3:
        newest = row.new[-1] if row.new else 0
        draft = [int(table_VV[newest].argmax())]
        draft.append(int(table_VV[draft[0]].argmax()))
        logits_1LV = table_VV[[newest, *draft]][None]
        for _, logits_BV in going_on([row], logits_1LV, [draft]):
            row.take(logits_BV[0])
    return row.new[:3]


def test_drawn_tokens_have_the_distribution_of_the_model(seed: int) -> None:
    """Chi-square test of all sequences of three tokens. With 63 degrees of freedom, 130 is exceeded once in 10^6."""
    torch.manual_seed(seed)
    table_VV = torch.randn(WORDS, WORDS)
    p_VV = table_VV.double().softmax(-1)
    expected_V3 = SEQUENCES * p_VV[0][:, None, None] * p_VV[:, :, None] * p_VV[None]
    counts = Counter(tuple(drawn(table_VV, 1000 * seed + number)) for number in range(SEQUENCES))
    found_V3 = torch.tensor(
        [[[counts[i, j, k] for k in range(WORDS)] for j in range(WORDS)] for i in range(WORDS)], dtype=torch.float64
    )
    rare = expected_V3 < 5
    terms = ((found_V3 - expected_V3) ** 2 / expected_V3)[~rare].tolist()
    if rare.any():
        pooled = float(expected_V3[rare].sum())
        terms.append((float(found_V3[rare].sum()) - pooled) ** 2 / pooled)
    assert sum(terms) < 130, sum(terms)


# Draft models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
def test_calls_with_a_draft_model_get_their_own_tokens(pair: Any, drafter: Any, seed: int, groups: int) -> None:
    drafted, accepted = follow_rows(pair, drafter, seed, groups)
    assert 0.1 * drafted < accepted < drafted


@pytest.mark.parametrize("variant", ["qwen3_next", "falcon_h1", "mamba", "lfm2"])
def test_draft_models_with_states_return_to_the_states_before_wrong_tokens(seed: int, variant: str) -> None:
    """The draft model agrees with the model on many tokens, but not on all, so rows lag."""
    config, name = zoo.config(variant, vocab_size=101), zoo.lm_head(variant)
    cls: Any = registry.find(name)
    torch.manual_seed(seed)
    whole: Any = zoo.original(name)(config).double().eval()
    with torch.no_grad():
        for path, param in whole.named_parameters():  # else, the newest token alone decides
            param.mul_(0.1 if "embed" in path else 3.0 if param.dim() == 2 else 1.0)
    model, drafter = (cls.from_config_with_parallel(config, dtype=torch.float64).eval(), cls(config).double().eval())
    model.load_state_dict(whole.state_dict())
    drafter.load_state_dict(whole.state_dict())
    with torch.no_grad():
        for param in drafter.parameters():
            param += 0.1 * param.std(correction=0) * torch.randn_like(param)
    drafted, accepted = follow_rows((model, whole), drafter, seed, 1)
    assert 0 < accepted < drafted, (accepted, drafted)


def test_states_before_steps_stay_while_rows_lag() -> None:
    """A draft model drafts for rows that lag: each of its steps is settled, and later some of them are cut."""
    cache = SlotCache(2, 30, layers=[LinearAttentionLayer()])
    cache.lengths, cache.stop = [5, 5], 5
    cache.make_room(2, 8)
    layer: Any = cache.layers[0]
    layer.lazy_initialization(recurrent_states=torch.zeros(2, 3))
    cache.settle([2, 1])
    assert cache.lags == {1: 1}
    for step in range(1, 5):
        cache.remember_step()
        layer.update_recurrent_state(torch.full((2, 3), float(step)))
        cache.settle([1, 1])
    cache.cut([1, 3])
    assert layer.recurrent_states[0].tolist() == [[3.0] * 3, [1.0] * 3]
    cache.cut([1, 1])  # nothing is remembered
    assert layer.recurrent_states[0].tolist() == [[3.0] * 3, [1.0] * 3]


def follow_rows(pair: Any, drafter: Any, seed: int, groups: int) -> tuple[int, int]:
    """Return the numbers of drafted and of accepted tokens of some calls.

    The cache of the draft model follows rows that accept some of its tokens, pause, leave and join: it drafts as
    without a cache.
    """
    model, whole = pair
    rng = random.Random(seed)
    calls = running.requests(rng, 12)
    application = Application(model, admission.with_states(model.config, LIMITS), groups, drafter)
    for drafts in application.batch._drafts:

        def propose(rows: Any, most: Any, drafting: Any = drafts.propose) -> Any:
            found = drafting(rows, most)
            for row, draft in zip(rows, found, strict=True):
                known = [*row.prompt, *row.new]
                for token in draft:
                    with lifted_casts():
                        assert token == int(drafter(torch.tensor([known])).logits[0, -1].argmax())
                    known.append(token)
            return found

        drafts.propose = propose  # type: ignore[method-assign]
    for number, call in enumerate(calls):
        application.send(rng.randrange(20), request(number, call, len(call["input_ids"]) == 1))
    with warnings.catch_warnings(), lifted_casts():
        warnings.simplefilter("error")  # the drafts of a model that fails end with a warning
        application.run()
    with lifted_casts():
        for number, call in enumerate(calls):
            assert torch.equal(application.answer(number).result, running.alone(whole, call))
    reported = [each for each in application.sent if isinstance(each, Speculated)]
    drafted, accepted = (sum(getattr(each, name) for each in reported) for name in ("drafted", "accepted"))
    return drafted, accepted


def test_draft_model_computes_only_new_tokens(pair: Any, seed: int) -> None:
    """The model itself drafts: all tokens are accepted, and its cache has the tokens of the rows."""
    model, whole = pair
    small = GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    small.load_state_dict(whole.state_dict())
    computed: list[int] = []
    small.register_forward_pre_hook(
        lambda module, args, kwargs: computed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    application = Application(model, replace(LIMITS, chunk=64), draft_model=small)
    calls = [greedy(seed + number, 21, eos_token_id=NO_TOKEN) for number in range(2)]
    for number, call in enumerate(calls):
        application.send(0, request(number, call))
    application.run()
    for number, call in enumerate(calls):
        assert application.answer(number).result.tolist() == running.alone(whole, {"seed": 0, **call}).tolist()
    reported = [each for each in application.sent if isinstance(each, Speculated)]
    assert sum(each.drafted for each in reported) == sum(each.accepted for each in reported) == 2 * 4 * 4
    # a prompt of 7 tokens for each row; then the newest tokens, and three drafted ones one after the other
    assert computed == [7, 7, *[2, 2, 2, 2], *[4, 2, 2, 2] * 3]


def test_draft_model_that_fails_is_left_out(pair: Any, drafter: Any, seed: int) -> None:
    model, whole = pair

    def fails(*args: Any) -> None:
        raise MemoryError("of the draft model")

    application = Application(model, LIMITS, draft_model=drafter)
    handle = drafter.register_forward_pre_hook(fails)
    call = greedy(seed, 9)
    application.send(0, request(0, call))
    with pytest.warns(UserWarning, match="the running batch drafts no tokens from now on: MemoryError"):
        application.run()
    handle.remove()
    assert application.answer(0).result.tolist() == running.alone(whole, {"seed": 0, **call}).tolist()
    assert not any(isinstance(each, Speculated) for each in application.sent)


# All decoders ---------------------------------------------------------------------------------------------------------

DECODERS = [
    variant
    for variant in (*zoo.FOUNDING, *zoo.MORE, "falcon-alibi", "falcon-one-kv")
    if running.is_decoder(variant) and admission.reason_against(zoo.config(variant)) is None
]
SMALL = replace(running.LIMITS, drafted=4)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "qwen3_next", "falcon_h1"])
def test_calls_with_drafts_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, variant: str, sizes: dict[str, int]
) -> None:
    running.compare(pool, variant, tmp_path, seed, limits=SMALL, **sizes)


@pytest.mark.zoo
@pytest.mark.parametrize("variant", DECODERS)
def test_decoders_of_the_zoo_with_drafts_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, variant: str
) -> None:
    config = zoo.config(variant)
    if (reason := admission.reason_against_drafts(config, SMALL.length)) is not None:
        pytest.skip(reason)
    running.compare(pool, variant, tmp_path, seed, 8, SMALL, tensor_parallel_size=2)


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_of_fixed_shapes_follow_drafts(
    tmp_path: Path, seed: int, variant: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of rows has one shape with drafts. In steps without drafts, rows that lag write to their columns."""
    name, calls, expected = running.checked(variant, tmp_path, seed, 30)
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(tmp_path, dtype=torch.float64).eval()
    assert graphs.reason_of_model(model) is None
    if fused:
        model.fuse(measure=False)
    lagged: list[bool] = []

    def static(model: Any, limits: BatchLimits) -> Any:
        runner = running.static_runner(model, limits, run_eagerly)
        replay = runner._replay

        def replayed(tokens: Any) -> Any:
            lagged.append(bool(runner.rows.lags) and max(map(len, tokens)) == 1)
            found = replay(tokens)
            assert {width for _, _, width in runner.static._steps} <= {1, 5}
            return found

        monkeypatch.setattr(runner, "_replay", replayed)
        return runner

    monkeypatch.setattr(running, "runner_of", static)
    with lifted_casts(), torch.no_grad():
        found = running.together(model, calls, random.Random(seed), SMALL, expected)
    for mine, right in zip(found, expected, strict=True):
        assert mine is None or torch.equal(mine, right)
    assert any(lagged)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 33, 2.0, True, "4"])
def test_other_numbers_are_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="speculative_tokens must be from 1 to 32, or left out for none"):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, deploy=True, speculative_tokens=count)


@pytest.mark.parametrize(
    ("variant", "changes", "reason"),
    [
        ("gemma2", {}, "some of its blocks attend to a window of"),
        ("gpt_neo", {}, "some of its blocks attend to a window of"),
        ("mistral", {"sliding_window": 40}, "some of its blocks attend to a window of 40 tokens"),
        ("mpt", {}, "its biases count the columns"),
        ("minimax", {}, "some of its blocks keep a state of all tokens"),
        ("t5", {}, "its decoder counts positions from the columns of the cache"),
        ("led", {}, "do not join the running batch: its decoder reads no mask when it computes one token"),
    ],
)
def test_models_with_other_caches_are_refused(variant: str, changes: dict[str, Any], reason: str) -> None:
    config = zoo.config(variant, **changes)
    cls: Any = registry.find(zoo.lm_head(variant))
    message = rf"speculative_tokens=3 is not possible for model_type='{config.model_type}': .*{reason}"
    with pytest.raises(ValueError, match=message):
        cls.from_config_with_parallel(config, deploy=True, speculative_tokens=3)


def test_a_window_of_the_whole_cache_is_no_window() -> None:
    config = zoo.config("mistral", sliding_window=columns(32))
    assert admission.reason_against_drafts(config, 32) is None
    assert "of 96 tokens" in str(admission.reason_against_drafts(config, 33))


def test_a_batch_of_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="speculative_tokens=2 is for the running batch, and max_batch_size=1"):
        GPT2LMHeadModel.from_config_with_parallel(
            deployment.CONFIG, deploy=True, speculative_tokens=2, max_batch_size=1
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 90}, "its vocabulary has 90 tokens, and the vocabulary of the model 101"),
        (None, "some of its blocks keep a state of all tokens"),
    ],
)
def test_models_that_cannot_draft_are_refused(tmp_path: Path, changes: dict[str, Any] | None, reason: str) -> None:
    draft = zoo.config("minimax", vocab_size=101) if changes is None else zoo.config("gpt2", **changes)
    draft.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"speculative_model='{tmp_path}' cannot draft tokens: .*{reason}"):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, deploy=True, speculative_model=tmp_path)


def test_a_draft_model_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OSError, match=r"speculative_model='\./nowhere' cannot be read"):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, deploy=True, speculative_model="./nowhere")
    with pytest.raises(ValueError, match="speculative_model must be a directory or a name, got int"):
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, deploy=True, speculative_model=3)


# With workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_deployed_model_counts_drafted_and_accepted_tokens(
    stand: Any, tmp_path: Path, seed: int, sizes: dict[str, int]
) -> None:
    torch.manual_seed(seed)
    whole = transformers.GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    whole.save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float64, "max_batch_size": 3, "deploy": True, "speculative_tokens": 4}
    batch = prompt(seed, 1, 4)
    repeated = {name: value.repeat(1, 3) for name, value in batch.items()}
    call = {**repeated, "max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    with GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path, **sizes, **options) as model:
        assert model.describe_batch().endswith("; up to 4 tokens of a row are drafted")
        streamer = deployment.Collected()
        expected = whole.generate(**call)
        assert torch.equal(model.generate(**call, streamer=streamer), expected)
        assert streamer.tokens == expected[0].tolist() and streamer.ended
        assert model.drafted_tokens > 0 and 0 <= model.accepted_tokens <= model.drafted_tokens


def test_deployed_model_has_a_draft_model(stand: Any, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    whole = transformers.GPT2LMHeadModel(deployment.SENSITIVE).double().eval()
    whole.save_pretrained(tmp_path)
    options: dict[str, Any] = {"dtype": torch.float64, "tensor_parallel_size": 2, "deploy": True}
    call = {**prompt(seed, 2), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": NO_TOKEN}
    with GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path, speculative_model=tmp_path, **options) as model:
        assert model.describe_batch().endswith("; up to 4 tokens of a row are drafted")
        assert torch.equal(model.generate(**call), whole.generate(**call))
        assert model.accepted_tokens == model.drafted_tokens == 2 * 12


def test_batch_pauses_drafts_that_take_longer_than_they_save() -> None:
    """Steps of few rows gain by drafts, and steps of many rows lose."""
    now = [0.0]
    clock: Any = lambda: now[0]  # noqa: E731

    def share_of_drafts(count: int, seconds: float, steps: int) -> float:
        rows = [
            SimpleNamespace(keys=[3, 4] * 8, new=[3], room=999, ended=False, speculation=None) for _ in range(count)
        ]
        drafts, found = Drafts(4, DraftSpeed(clock)), 0
        for _ in range(steps):
            made = drafts.draft(rows)
            found += bool(made)
            for row in rows:
                row.new += [4, 3, 4, 3, 4][-len(row.new) % 2 :][: 1 + 2 * bool(made)]
            now[0] += seconds if made else 1.0
            drafts.settle()
        return found / steps

    assert share_of_drafts(1, 2.0, 200) > 0.9
    assert share_of_drafts(1, 4.0, 200) < 0.15
    assert share_of_drafts(8, 4.0, 200) < 0.15
    assert share_of_drafts(8, 4.0, 30) * 30 == 2  # each step shows the gains of eight rows


def test_speed_of_drafts_is_the_mean_of_skewed_gains() -> None:
    """Most steps gain one token and some gain five. At 1.5 times the time of a step without drafts, they save time."""
    now = [0.0]
    drafts, row = Drafts(4, DraftSpeed(lambda: now[0])), SimpleNamespace(keys=[3] * 9, new=[3], room=999, ended=False)
    row.speculation = SimpleNamespace(draft=lambda new, most: [3] * most, note=lambda *counts: None)
    made = []
    for step in range(120):
        made.append(bool(drafts.draft([row])))  # type: ignore[list-item]
        row.new += [3] * (1 if not made[-1] or step % 5 < 3 else 5)
        now[0] += 1.5 if made[-1] else 1.0
        drafts.settle()
    assert sum(made) > 0.9 * len(made)
