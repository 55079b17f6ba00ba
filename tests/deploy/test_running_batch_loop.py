"""The loop of the running batch, in this process: its messages for calls that join, fail and leave at chosen steps."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from oslo_models.deploy.messages import Failure, Reply, Request, Reused
from oslo_models.deploy.running_batch import loop
from oslo_models.deploy.running_batch.admission import Admission, reason_against
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.slot_groups import limits_of_groups

from support import deployment, running, zoo
from support.batch_loop import LIMITS, Application, greedy, request
from support.deployment import prompt


def alone(whole: Any, call: dict[str, Any]) -> list[list[int]]:
    tokens: Tensor = running.alone(whole, {"seed": 0, **call})
    return tokens.tolist()


@pytest.mark.parametrize(("chunk", "groups"), [(LIMITS.chunk, 1), (LIMITS.length, 1), (LIMITS.chunk, 2)])
def test_calls_are_answered_with_their_own_tokens(pair: Any, seed: int, chunk: int, groups: int) -> None:
    """Streams get the prompt, each token in its step's message, and the end; prompts are chunked or batched."""
    model, whole = pair
    rng, application = random.Random(seed), Application(model, replace(LIMITS, chunk=chunk), groups)
    calls = running.requests(rng, 12)
    for number, call in enumerate(calls):
        application.send(rng.randrange(20), request(number, call, len(call["input_ids"]) == 1))
    application.run()
    for number, call in enumerate(calls):
        expected = running.alone(whole, call)
        assert torch.equal(application.answer(number).result, expected)
        if len(expected) == 1:
            length = call["input_ids"].shape[1]
            new = expected[0, length:].tolist()
            assert application.streamed(number) == [call["input_ids"].tolist(), *new, None]


def test_short_prompts_are_computed_together(pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This needs little padding, and no prompt that begins with another. All prompts get their first token then."""
    model, whole = pair
    lengths = (9, 7, 8, 2, 12, 12)
    calls = [greedy(seed + number, 5, length) for number, length in enumerate(lengths)]
    calls.append({**calls[5], "input_ids": calls[5]["input_ids"].clone()})
    application = Application(model, BatchLimits(8, 64, 30))
    for number, call in enumerate(calls):
        application.send(0, request(number, call, stream=True))
    runner, joined = application.batch.runners[0], list[list[int]]()
    right, logits = runner.run, [list[Tensor]() for _ in calls]

    def run(step: Any) -> Any:
        logits_BV = right(step)
        numbers = [prompt.number for prompt in step.whole] or ([step.number] if step.chunk else runner.numbers)
        for number, logits_V in zip(numbers, logits_BV, strict=True):
            logits[number].append(logits_V)
        if step.chunk:
            joined.append(numbers)
        return logits_BV

    monkeypatch.setattr(runner, "run", run)
    application.run()
    assert joined == [[0, 1, 2], [3], [4, 5], [6]]
    assert reused(application) == [11]
    for number, call in enumerate(calls):
        answer = application.answer(number).result
        assert answer.tolist() == alone(whole, call)
        assert len(application.streamed(number)) == 7
        with torch.no_grad():
            expected_LV = whole(answer).logits[0, -6:-1]
        torch.testing.assert_close(torch.stack(logits[number]), expected_LV, rtol=1e-10, atol=1e-10)


def test_rows_end_at_their_own_tokens_and_are_padded(pair: Any, seed: int) -> None:
    """One row of a call stops at an end token; the other row and another call without such a token continue."""
    model, whole = pair
    batch = prompt(seed, 2)
    plain = {**batch, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 7}
    first = alone(whole, plain)[0][batch["input_ids"].shape[1] :]
    ending = {**batch, "max_new_tokens": 9, "do_sample": False, "eos_token_id": [first[2]], "pad_token_id": 7}
    application = Application(model)
    application.send(0, request(0, ending))
    application.send(1, request(1, plain))
    application.run()
    for number, call in enumerate((ending, plain)):
        assert application.answer(number).result.tolist() == alone(whole, call)


@pytest.mark.parametrize("when", [0, 1, 4])
def test_processor_that_raises_ends_its_call_only(pair: Any, seed: int, when: int) -> None:
    model, whole = pair

    class Raises(transformers.LogitsProcessor):
        seen = 0

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            self.seen += 1
            if self.seen > when:
                raise ZeroDivisionError("of the processor")
            return scores

    calls = [greedy(seed, 8), greedy(seed + 1, 8, logits_processor=[Raises()]), greedy(seed + 2, 8, length=3)]
    application = Application(model)
    for number, call in enumerate(calls):
        application.send(number, request(number, call, stream=True))
    application.send(3, request(3, greedy(seed + 3, 5)))
    application.run()
    failure = application.answer(1)
    assert isinstance(failure, Failure) and isinstance(failure.error, ZeroDivisionError)
    assert len(application.streamed(1)) == 1 + when  # the prompt and earlier tokens, but no end
    for number, call in ((0, calls[0]), (2, calls[2]), (3, greedy(seed + 3, 5))):
        assert application.answer(number).result.tolist() == alone(whole, call)


class Burns(transformers.LogitsProcessor):
    """Takes CPU time for each token."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        began = time.thread_time()
        while time.thread_time() < began + self.seconds:
            pass
        return scores


def test_slow_processors_end_their_calls_only(pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors of a step take 0.06 s of 0.05 s, so the slowest call ends."""
    monkeypatch.setattr(loop, "STEP_SECONDS", 0.05)
    model, whole = pair
    calls = [greedy(seed + number, 6) for number in range(3)]
    slow = {0: 0.02, 1: 0.04}
    application = Application(model, replace(LIMITS, chunk=LIMITS.length))
    for number, call in enumerate(calls):
        burns = {"logits_processor": [Burns(slow[number])]} if number in slow else {}
        application.send(0, request(number, {**call, **burns}, stream=True))
    application.run()
    failure = application.answer(1)
    assert isinstance(failure, Failure) and "too much time per token" in str(failure.error)
    for number in (0, 2):
        assert application.answer(number).result.tolist() == alone(whole, calls[number])


def test_calls_with_grammars_join_in_steps_of_their_own(pair: Any, seed: int) -> None:
    """Compiling a grammar holds up the rows."""
    model, _ = pair
    application = Application(model)
    application.send(0, request(0, greedy(seed, 12)))
    grammar = SimpleNamespace(grammar="compiled", logprobs=None, processors=list)
    for number in (1, 2):
        application.send(2, request(number, greedy(seed + number, 3, length=4, decoding=grammar)))
    application.run()
    first = [next(step for step, rows in enumerate(application.rows) if number in rows) for number in (1, 2)]
    assert first[1] > first[0]


@pytest.mark.parametrize("state", ["row", "prompt", "waiting"])
def test_cancelled_call_leaves_at_once(pair: Any, seed: int, state: str) -> None:
    """A call leaves from its slot, during its prompt, or while it waits. Other calls are not affected."""
    model, whole = pair
    rows = {"row": 2, "prompt": 2, "waiting": 4}[state]
    calls = [greedy(seed + number, 12) for number in range(rows)]
    length = 40 if state == "prompt" else 7
    cancelled = greedy(seed, 20, length)
    application = Application(model)
    for number, call in enumerate(calls):
        application.send(0, request(number, call))
    application.send(1, request(9, cancelled, stream=True))
    application.cancel(9, 9)
    application.run()
    assert application.answer(9).result is None
    assert application.at[application.sent.index(application.answer(9))] == 9
    assert (9 in application.rows[8]) is (state == "row") and not any(9 in rows for rows in application.rows[9:])
    assert len(application.streamed(9)) < {"row": 9, "prompt": 2, "waiting": 1}[state]
    for number, call in enumerate(calls):
        assert application.answer(number).result.tolist() == alone(whole, call)
    assert application.cancelled == set()
    assert application.batch.runners[0].rows.lengths == [] and application.batch.runners[0].calls() == set()


def test_row_that_is_dropped_while_its_step_is_computed_ends(pair: Any, seed: int) -> None:
    """Two groups: one call is cancelled after the next step of its row was published; its slot becomes free."""
    model, whole = pair
    application = Application(model, BatchLimits(2, 64, 32), groups=2)
    calls = [greedy(seed + number, 10 if number != 1 else 50) for number in range(3)]
    batch, publish = application.batch, application.batch.channel.publish

    def published(step: Any) -> None:
        publish(step)
        if step.group == 1 and len(application.rows) >= 9 and 1 in batch._calls:
            application.cancelled.add(1)

    batch.channel.publish = published  # type: ignore[method-assign]
    take = batch._take_all

    def take_all(rows: list[Any], *rest: Any) -> None:
        batch._drop_cancelled()  # another thread may cause this at any time
        take(rows, *rest)

    batch._take_all = take_all  # type: ignore[method-assign]
    for number, call in enumerate(calls):
        application.send(0, request(number, call, stream=True))
    application.run()
    assert application.answer(1).result is None and 2 < len(application.streamed(1)) < 10
    assert len(application.rows) < 40
    for number in (0, 2):
        assert application.answer(number).result.tolist() == alone(whole, calls[number])
    assert [runner.rows.lengths for runner in batch.runners] == [[], []]


@pytest.mark.parametrize(("rows", "stages", "expected"), [(8, 2, [4, 4]), (3, 2, [2, 1]), (2, 4, [1, 1]), (5, 1, [5])])
def test_groups_have_as_many_rows_as_were_asked_for(rows: int, stages: int, expected: list[int]) -> None:
    found = limits_of_groups(BatchLimits(rows, 64, 4), stages)
    assert [own.rows for own in found] == expected and {own.length for own in found} == {64}


def test_groups_share_the_rows_and_prefixes_decide(pair: Any, seed: int) -> None:
    """Rows are divided over groups; a prompt joins the group with its cached prefix if that group has a free slot."""
    model, whole = pair
    application = Application(model, BatchLimits(4, 90, 30), groups=2)
    calls = [greedy(seed + number, 12, 10 + number) for number in range(4)]
    calls.append(after(torch.tensor(alone(whole, calls[1])), seed + 9))
    for number, call in enumerate(calls):
        application.send(0 if number < 4 else 80, request(number, call))
    seen: list[list[list[int]]] = []
    count = application.batch._count_token
    application.batch._count_token = lambda: (
        seen.append([list(r.numbers) for r in application.batch.runners]) or count()
    )  # type: ignore[func-returns-value]
    application.run()
    assert [[0, 2], [1, 3]] in seen and any(groups == [[], [4]] for groups in seen)
    assert reused(application) == [11 + 12 - 1]
    for number, call in enumerate(calls):
        assert application.answer(number).result.tolist() == alone(whole, call)


@pytest.mark.parametrize("groups", [1, 2])
def test_other_calls_are_answered_between_steps_and_changes_after_the_rows(pair: Any, seed: int, groups: int) -> None:
    model, whole = pair
    application = Application(model, groups=groups)
    calls = {0: {**greedy(seed, 10), **prompt(seed, groups)}, 4: greedy(seed + 1, 6)}
    application.send(0, request(0, calls[0]))
    application.send(2, Request(1, "forward", (), {}, 0))
    application.send(4, Request(2, "fuse", (), {}, 0))
    application.send(5, Request(3, "forward", (), {}, 0))
    application.send(5, request(4, calls[4]))
    application.run()
    order = [each.number for each in application.sent if isinstance(each, Reply)]
    assert order == [1, 0, 2, 3, 4]
    assert 2 <= application.at[0] <= 1 + groups and application.answer(1).result == "forward"
    for number, call in calls.items():
        assert application.answer(number).result.tolist() == alone(whole, call)


@pytest.mark.parametrize(("groups", "first"), [(1, True), (1, False), (2, False)])
def test_call_that_cannot_join_gives_way_after_each_token(pair: Any, seed: int, groups: int, first: bool) -> None:
    """A stream goes on, and a call that arrives later overtakes all calls that cannot join."""
    model, whole = pair
    application = Application(model, groups=groups)
    calls = {0: greedy(seed, 20), 3: greedy(seed + 1, 6)}
    exclusive = [Request(number, "generate", (tokens,), {}, 0, gives_way=True) for number, tokens in ((1, 40), (2, 5))]
    application.send(0, request(0, calls[0], stream=True))
    application.send(0 if first else 3, exclusive[0])
    application.send(4, exclusive[1])
    application.send(5, request(3, calls[3]))
    if first:
        application._later.sort(key=lambda each: each[0])
        application._later[:2] = application._later[1::-1]
    application.run()
    assert [each.number for each in application.sent if isinstance(each, Reply)] == [3, 0, 1, 2]
    assert application.at[application.sent.index(application.answer(3))] <= 5 + 2 * groups * 8
    for number, call in calls.items():
        assert application.answer(number).result.tolist() == alone(whole, call)


def test_failed_forward_ends_all_calls_and_later_ones_are_computed(
    pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = pair
    application = Application(model)
    right, runs = application.batch.runners[0].run, []

    def run(step: Any) -> Any:
        runs.append(step)
        if len(runs) == 6:
            application.send(0, request(5, greedy(seed, 10)))  # it is there before the next step
            raise MemoryError("of the step")
        return right(step)

    monkeypatch.setattr(application.batch.runners[0], "run", run)
    for number in range(5):  # two of them wait for a slot
        application.send(0, request(number, greedy(seed, 10, 4)))
    application.run()
    for number in range(5):
        failure = application.answer(number)
        assert isinstance(failure, Failure) and isinstance(failure.error, MemoryError)
    assert application.answer(5).result.tolist() == alone(whole, greedy(seed, 10))


def test_call_that_generate_rejects_fails_by_itself(pair: Any, seed: int) -> None:
    model, whole = pair
    application = Application(model)
    application.send(0, request(0, greedy(seed, 8)))
    application.send(2, request(1, {**greedy(seed, 8), "input_ids": torch.tensor([[5, 101]]), "attention_mask": None}))
    application.send(3, request(2, greedy(seed, 8, temperature="warm", do_sample=True)))
    application.run()
    assert isinstance(application.answer(1).error, IndexError)
    assert isinstance(application.answer(2), Failure)
    assert application.answer(0).result.tolist() == alone(whole, greedy(seed, 8))


IDS, TWO = torch.ones(1, 6, dtype=torch.long), torch.ones(2, 6, dtype=torch.long)
LEFT, RIGHT, HOLE = (
    torch.tensor([each, [1] * 6]) for each in ([0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1])
)
ADMITTED: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"input_ids": IDS}, True),
    "by position": ({"inputs": IDS, "max_new_tokens": 3}, True),
    "sampled": ({"input_ids": IDS, "do_sample": True}, True),
    "two sampled rows": ({"input_ids": TWO, "do_sample": True}, False),
    "as many rows as slots": ({"input_ids": TWO[:1].expand(3, -1)}, True),
    "more rows than slots": ({"input_ids": TWO[:1].expand(4, -1)}, False),
    "padded left": ({"input_ids": TWO, "attention_mask": LEFT}, True),
    "padded right": ({"input_ids": TWO, "attention_mask": RIGHT}, False),
    "a row of padding": ({"input_ids": TWO, "attention_mask": HOLE * torch.tensor([[0], [1]])}, False),
    "hole in the mask": ({"input_ids": TWO, "attention_mask": HOLE}, False),
    "mask of another shape": ({"input_ids": TWO, "attention_mask": LEFT[:, 1:]}, False),
    "to the last position": ({"input_ids": IDS, "max_new_tokens": 58}, True),
    "too long": ({"input_ids": IDS, "max_new_tokens": 59}, False),
    "too long in all": ({"input_ids": IDS, "max_length": 65}, False),
    "longer than it may become": ({"input_ids": IDS, "max_length": 6}, False),
    "beams": ({"input_ids": IDS, "num_beams": 2}, False),
    "one beam": ({"input_ids": IDS, "num_beams": 1}, True),
    "two answers": ({"input_ids": IDS, "num_return_sequences": 2, "do_sample": True}, False),
    "scores": ({"input_ids": IDS, "return_dict_in_generate": True}, False),
    "embeddings": ({"inputs_embeds": torch.ones(1, 6, 8)}, False),
    "unknown argument": ({"input_ids": IDS, "token_type_ids": IDS}, False),
    "floats": ({"input_ids": IDS.float()}, False),
    "no tokens": ({"input_ids": IDS[:, :0]}, False),
}


@pytest.mark.parametrize("what", ADMITTED)
def test_admission(what: str) -> None:
    call, expected = ADMITTED[what]
    defaults = transformers.GenerationConfig()
    assert Admission(deployment.CONFIG, LIMITS).joins(call, defaults, False) is expected
    assert not Admission(deployment.CONFIG, BatchLimits(rows=1)).joins(call, defaults, False)
    if len(next(iter(call.values()))) > 1:
        assert not Admission(deployment.CONFIG, LIMITS).joins(call, defaults, True)  # a streamer is for one row


def test_admission_looks_at_all_configurations() -> None:
    beams = transformers.GenerationConfig(num_beams=2)
    call: dict[str, Any] = {"input_ids": IDS}
    admission = Admission(deployment.CONFIG, LIMITS)
    assert not admission.joins(call, beams, False)
    assert not admission.joins({**call, "generation_config": beams}, transformers.GenerationConfig(), False)
    assert admission.joins({**call, "num_beams": 1}, beams, False)
    assert not admission.joins(call, None, False)


@pytest.mark.parametrize(("variant", "expected"), [("xlstm", False), ("mamba", True)])
def test_padded_calls_of_types_that_read_padding_do_not_join(variant: str, expected: bool) -> None:
    admission, defaults = Admission(zoo.config(variant), LIMITS), transformers.GenerationConfig()
    whole = {"input_ids": TWO, "attention_mask": torch.ones_like(TWO)}
    assert admission.joins(whole, defaults, False)
    assert admission.joins({**whole, "attention_mask": LEFT}, defaults, False) is expected


ENCODED: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "padding on the right": ({"attention_mask": RIGHT}, True),
    "padding on the left": ({"attention_mask": LEFT}, False),
    "padding tokens without a mask": ({"attention_mask": None, "pad_token_id": int(TWO[1, 1])}, False),
    "padding tokens with a mask": ({"pad_token_id": int(TWO[1, 1])}, True),
    "a start for each row": ({"decoder_start_token_id": [1, 2]}, False),
    "tokens of the decoder": ({"decoder_input_ids": TWO}, False),
    "states of the encoder": ({"encoder_outputs": (torch.zeros(2, 2, 3),)}, False),
    "beams": ({"num_beams": 2}, False),
    "longest answer": ({"max_new_tokens": LIMITS.length - 1}, True),
    "longer answer": ({"max_new_tokens": LIMITS.length}, False),
    "longest prompt": ({"input_ids": torch.full((1, LIMITS.length - 1), 5), "attention_mask": None}, True),
    "longer prompt": ({"input_ids": torch.full((1, LIMITS.length), 5), "attention_mask": None}, False),
}


@pytest.mark.parametrize("what", ENCODED)
def test_admission_of_encoder_decoders(what: str) -> None:
    changes, expected = ENCODED[what]
    call = {"input_ids": TWO, "attention_mask": torch.ones_like(TWO), **changes}
    defaults = transformers.GenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    assert Admission(zoo.config("t5"), LIMITS).joins(call, defaults, False) is expected


# Prefixes -------------------------------------------------------------------------------------------------------------


def after(ids_BL: Tensor, seed: int, new: int = 6, length: int = 3, **options: Any) -> dict[str, Any]:
    """A call with a prompt that continues other tokens."""
    call = greedy(seed, new, length, **options)
    ids = torch.cat([ids_BL, call["input_ids"]], 1)
    return {**call, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def reused(application: Application) -> list[int]:
    return [each.tokens for each in application.sent if isinstance(each, Reused)]


def without_chance(calls: dict[int, dict[str, Any]]) -> bool:
    """Whether all prompts differ directly after their common prefix."""
    lasts = [tuple(call["input_ids"][0, -3:].tolist()) for call in calls.values()]
    return len({last[0] for last in lasts}) == len(lasts)


@pytest.mark.parametrize("reuses", [True, False])
def test_shared_prefixes_are_computed_once(pair: Any, seed: int, reuses: bool) -> None:
    """Reuse prefixes of running rows, of ended rows, and of a full prompt and answer; tokens stay the same."""
    model, whole = pair
    system = prompt(seed, 1, 20)["input_ids"]
    calls = {number: after(system, seed + number) for number in (0, 1)}
    calls[2] = {**after(system, seed + 2), "do_sample": True, "temperature": 0.9, "seed": 5}
    calls[3] = after(torch.tensor(alone(whole, calls[0])), seed + 3)  # the next turn of a chat
    calls[4] = calls[3]
    application = Application(model, BatchLimits(3, 64, 4, reuses))
    for number, (call, step) in enumerate(zip(calls.values(), (0, 2, 50, 100, 150), strict=True)):
        application.send(step, request(number, call))
    application.run()
    for number, call in calls.items():
        assert application.answer(number).result.tolist() == alone(whole, call)
    # the last token of an answer was not computed; the last token of a repeated prompt is computed again
    if reuses and without_chance({number: calls[number] for number in range(3)}):
        assert reused(application) == [20, 20, 23 + 5, 29 + 3 - 1]
    assert bool(reused(application)) is reuses is bool(application.batch.runners[0].rows.kept)


def test_row_that_ends_first_changes_places_with_the_last(pair: Any, seed: int) -> None:
    """The other rows continue. The next turn of its chat, with the longest prompt, reuses its cached prefix."""
    model, whole = pair
    first = greedy(seed, 4, 10)
    turn = after(torch.tensor(alone(whole, first)), seed + 9, length=40)
    calls = [first, greedy(seed + 1, 40, 19), greedy(seed + 2, 40, 14), turn]
    application = Application(model, BatchLimits(4, 90, 30))
    for number, (call, step) in enumerate(zip(calls, (0, 0, 0, 12), strict=True)):
        application.send(step, request(number, call))
    application.run()
    assert [0, 1, 2] in application.rows and [2, 1, 3] in application.rows
    for number, call in enumerate(calls):
        assert application.answer(number).result.tolist() == alone(whole, call)
    assert reused(application) == [10 + 4 - 1]


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_prefixes_stay_while_rows_come_and_memory_grows(pair: Any, seed: int, rows: int) -> None:
    """Chats in turns: each turn continues the last answer, in any slot that holds its prefix now."""
    model, whole = pair
    rng, application = random.Random(seed), Application(model, BatchLimits(rows, 120, 7))
    said = {chat: prompt(seed + chat, 1, 9)["input_ids"] for chat in range(4)}
    calls = []
    for turn in range(40):
        chat = rng.randrange(4)
        way = rng.choice(running.WAYS)
        call = {**after(said[chat], rng.getrandbits(30), rng.randint(1, 7)), "seed": turn, "pad_token_id": 0, **way}
        call.pop("min_new_tokens", None)
        calls.append((call, running.alone(whole, call)))
        said[chat] = calls[-1][1]
        application.send(rng.randrange(100) if turn else 0, request(turn, call))
    application.run()
    for number, (_, expected) in enumerate(calls):
        assert torch.equal(application.answer(number).result, expected)
    assert reused(application)


def test_prefixes_are_forgotten_when_the_model_changes(pair: Any, seed: int) -> None:
    """This includes prefixes of rows that are computed at that time."""
    model, whole = pair
    call, application = greedy(seed, 6, 20), Application(model)
    forgets = iter((True, True, False))

    def other(message: Request) -> None:
        if next(forgets):
            application.batch.forget_prefixes()
        application._send(Reply(message.number, message.method), message.number)

    application._answer = other  # type: ignore[method-assign]
    for number, step in enumerate((0, 20, 60, 100)):
        application.send(step, request(number, call))
    for number, step in ((4, 3), (5, 50), (6, 80)):
        application.send(step, Request(number, "save_pretrained", (), {}, 0))
    application.run()
    for number in range(4):
        assert application.answer(number).result.tolist() == alone(whole, call)
    assert reused(application) == [19]


def test_failed_forward_leaves_no_prefixes(pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = pair
    application, call = Application(model), greedy(seed, 6, 20)
    right, runs = application.batch.runners[0].run, []

    def run(step: Any) -> Any:
        runs.append(step)
        if len(runs) == 20:
            raise MemoryError("of the step")
        return right(step)

    monkeypatch.setattr(application.batch.runners[0], "run", run)
    for number, step in enumerate((0, 8, 60, 90, 120)):
        application.send(step, request(number, call))
    application.run()
    assert isinstance(application.answer(2), Failure)
    for number in (0, 1, 3, 4):
        assert application.answer(number).result.tolist() == alone(whole, call)
    assert reused(application) == [19, 19, 19]  # by 1, 2 and 4


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 90),
        ({"rope_type": "linear"}, 90),
        ({"rope_type": "dynamic"}, 89),
        ({"rope_type": "longrope", "original_max_position_embeddings": 40}, 40),
        (
            {
                "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 40},
                "sliding_attention": {"rope_type": "default"},
            },
            40,
        ),
    ],
)
def test_rows_are_too_short_to_change_the_positions_of_others(rope: Any, expected: int) -> None:
    """Beyond, the longest row of a batch changes the rotary frequencies of all rows."""
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1)
    config.rope_parameters, config.max_position_embeddings = rope, 90
    assert reason_against(config) is None
    admission, defaults = Admission(config, BatchLimits(2, 100)), transformers.GenerationConfig()
    for new, joins in ((expected - 7, True), (expected - 6, False)):
        assert admission.joins({"input_ids": torch.ones(1, 7).long(), "max_new_tokens": new}, defaults, False) is joins


@pytest.mark.parametrize(("mode", "expected"), [("per_loop", True), ("last_loop", False)])
def test_models_with_loops_over_one_cache_do_not_join(mode: str, expected: bool) -> None:
    """An option of Dory."""
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, num_hidden_layers=1)
    config.recurrent_kv_cache_mode = mode
    assert (reason_against(config) is None) is expected
