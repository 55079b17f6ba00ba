"""Rows sampled together get the same tokens as rows sampled alone, and the host waits once."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oslo_models.deploy.decoding import Decoding
from oslo_models.deploy.messages import Failure, Request
from oslo_models.deploy.running_batch import sampling, static_step
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.penalties import Penalty, TokenTable
from oslo_models.deploy.running_batch.preparation import prepare
from oslo_models.deploy.running_batch.row import Row
from oslo_models.deploy.running_batch.sampling import choose_tokens, warp_of
from oslo_models.deploy.running_batch.step import Step, WholePrompt

from support import running
from support.batch_loop import LIMITS, Application, greedy, request
from support.running import static_runner

SAMPLED: tuple[dict[str, Any], ...] = (
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 0},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_k": 0, "top_p": 0.7},
    {"top_k": 0, "top_p": 1e-9},
    {"top_k": 0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 20, "repetition_penalty": 1.4},
    {"top_k": 0, "typical_p": 0.8},
)
PENALIZED: tuple[dict[str, Any], ...] = (
    {"do_sample": True, "top_k": 20, "decoding": Decoding(frequency_penalty=0.4, presence_penalty=0.7)},
    {"do_sample": False, "repetition_penalty": 1.5, "decoding": Decoding(presence_penalty=2.0)},
    {"do_sample": False, "repetition_penalty": 0.6},
)
WAYS = (*({"do_sample": True, **each} for each in SAMPLED), {"do_sample": False}, running.WAYS[1], *PENALIZED)


class Launches(TorchDispatchMode):
    """Records computing operations; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.overloadpacket.__name__)
        return out


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "TOGETHER_ON", ("cpu",))


def rows_of(model: Any, seed: int, count: int = len(WAYS)) -> list[Row]:
    """A row of each way, again and again."""
    rng, made = random.Random(seed), []
    for number in range(count):
        ids = torch.tensor([[rng.randrange(3, 101) for _ in range(rng.randint(1, 6))]])
        given = {"input_ids": ids, "max_new_tokens": 30, "pad_token_id": 0, **WAYS[number % len(WAYS)]}
        made += prepare(model, Request(number, "generate", (), given, rng.getrandbits(32))).rows
    return made


@pytest.mark.parametrize("ties", [False, True])
def test_rows_draw_their_own_tokens(pair: Any, seed: int, ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test many steps, because each advances the generators, and equal logits, as in 16-bit dtypes."""
    model, _ = pair
    as_on_a_gpu(monkeypatch)
    together, alone, table = rows_of(model, seed), rows_of(model, seed), TokenTable()
    assert {row.warp is None for row in together} == {False, True}
    draw = torch.Generator().manual_seed(seed)
    for step in range(20):
        logits_BV = (0.3, 3)[step % 2] * torch.randn(len(together), 101, generator=draw)
        if ties:
            logits_BV = logits_BV.round()
            logits_BV += 1e-3 * torch.arange(101)  # whichever of equal ones is removed is up to torch.sort
        before = logits_BV.clone()
        tokens = choose_tokens(together, logits_BV, table)
        assert torch.equal(before, logits_BV)
        for row, other, token, logits_V in zip(together, alone, tokens, logits_BV, strict=True):
            assert (token is None) == row.ended == other.ended
            assert token is None or (isinstance(token, int) and row.take_token(token) == other.take(logits_V))


def test_loop_draws_together(pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = pair
    as_on_a_gpu(monkeypatch)
    rng, application = random.Random(seed), Application(model)
    calls = running.requests(rng, 12)
    for number, call in enumerate(calls):
        application.send(rng.randrange(20), request(number, call, len(call["input_ids"]) == 1))
    application.run()
    for number, call in enumerate(calls):
        assert torch.equal(application.answer(number).result, running.alone(whole, call))


def test_processor_that_raises_and_nan_end_their_calls(pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, whole = pair
    as_on_a_gpu(monkeypatch)

    def spoils(ids: Tensor, scores: Tensor) -> Tensor:
        return scores * float("nan")

    def raises(ids: Tensor, scores: Tensor) -> Tensor:
        raise ZeroDivisionError("of the processor")

    sampled = {"do_sample": True, "seed": 5}
    calls = [greedy(seed, 8), greedy(seed + 1, 8, logits_processor=[raises])]
    calls.append({**greedy(seed + 2, 8, logits_processor=[spoils]), **sampled})
    application = Application(model, LIMITS)
    for number, call in enumerate(calls):
        application.send(0, request(number, call))
    application.run()
    assert torch.equal(application.answer(0).result, running.alone(whole, {"seed": 0, **calls[0]}))
    for number, kind in ((1, ZeroDivisionError), (2, RuntimeError)):
        failure = application.answer(number)
        assert isinstance(failure, Failure) and type(failure.error) is kind


def _with_lengths_of_rows(processor: Any) -> Any:
    """Newer releases of transformers ignore another number of tokens in each row."""
    processor.prompt_ignore_length = torch.tensor([2])
    return processor


@pytest.mark.parametrize(
    "processors",
    [
        [transformers.TopKLogitsWarper(3), transformers.TemperatureLogitsWarper(0.5)],
        [transformers.TopKLogitsWarper(3), transformers.TopKLogitsWarper(2)],
        [transformers.TopPLogitsWarper(0.5, min_tokens_to_keep=2)],
        [transformers.TopKLogitsWarper(3, filter_value=-9.0)],
        [transformers.TypicalLogitsWarper(0.5)],
        [transformers.TemperatureLogitsWarper(0.5), transformers.RepetitionPenaltyLogitsProcessor(1.5)],
        [_with_lengths_of_rows(transformers.RepetitionPenaltyLogitsProcessor(1.5))],
    ],
)
def test_other_processors_are_called(processors: list[Any]) -> None:
    assert warp_of(processors) is None


def test_rows_with_penalties_come_and_go(pair: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the table are used again, and the table grows with rows and lengths."""
    model, _ = pair
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "WAYS", PENALIZED)
    rng, table = random.Random(seed), TokenTable()
    together, alone = rows_of(model, seed, 40), rows_of(model, seed, 40)
    draw, most = torch.Generator().manual_seed(seed), 0
    for _ in range(150):
        here = [i for i, row in enumerate(together) if not row.ended][: rng.randint(1, 6)]
        rng.shuffle(here)
        if not here:
            break
        logits_BV = torch.randn(len(here), 101, generator=draw)
        tokens = choose_tokens([together[i] for i in here], logits_BV, table)
        for index, (i, token) in enumerate(zip(here, tokens, strict=True)):
            assert isinstance(token, int) and together[i].take_token(token) == alone[i].take(logits_BV[index])
        most = max(most, len(table._ids_SL))
    assert 6 <= most < 30, f"{most} slots for at most 12 rows at a time"


@pytest.mark.parametrize("ways", [(14,), (8, 12, 13)])
def test_launches_for_penalties_do_not_depend_on_the_number_of_rows(
    pair: Any, seed: int, ways: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise has a launch for each row that samples, since each has a generator."""
    model, _ = pair
    as_on_a_gpu(monkeypatch)
    counts = []
    for rows in (3, 9, 63):
        table, launches = TokenTable(), Launches()
        made = [row for index, row in enumerate(rows_of(model, seed, 99 * len(WAYS))) if index % len(WAYS) in ways]
        made = made[:rows]
        logits_BV = torch.randn(rows, 101)
        _take(made, logits_BV, table)
        with launches:
            choose_tokens(made, logits_BV, table)
        counts.append(
            launches.names.count("exponential_") - sum(row.generator is not None and not row.ended for row in made)
        )
        counts.append(len(launches.names) - launches.names.count("exponential_"))
    assert counts[:2] * 3 == counts and counts[0] == 0, counts


def test_tokens_before_an_ignored_length_do_not_count() -> None:
    """transformers' processor has the argument, and no argument of ``generate`` sets it."""
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=2)
    warp = warp_of([processor])
    assert warp is not None and warp.penalty == Penalty(repetition=1.5, ignored=2)
    row = _Held(torch.tensor([[4, 5, 6, 4]]), [7, 8])
    scores_BV = torch.randn(1, 11)
    expected = processor(torch.tensor([[4, 5, 6, 4, 7, 8]]), scores_BV.clone())  # type: ignore[arg-type]
    TokenTable().penalize_(scores_BV, [(0, row, warp.penalty)])
    assert torch.equal(scores_BV, expected)


class _Held:
    """The tokens of a row."""

    ended = False

    def __init__(self, given_BL: Tensor, new: list[int]) -> None:
        self.given_BL, self.new, self.length = given_BL, new, given_BL.shape[1] + len(new)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_host_waits_once_and_copies_twice_in_a_step(
    pair: Any, seed: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of greedy rows it copies the inputs of the step only, of others their settings and which of them sample too.

    The stand-in counts methods that wait for a GPU and tensors that are made from the host's values.
    """
    model, _ = pair
    as_on_a_gpu(monkeypatch)
    counts: Counter[str] = Counter()
    for name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        _count(monkeypatch, torch.Tensor, name, counts, "waits")
    _count(monkeypatch, torch, "tensor", counts, "copies")
    _count(monkeypatch, static_step, "for_device", counts, "through pinned memory")
    _count(monkeypatch, sampling, "to_host", counts, "reads through pinned memory")
    for ways, copies in (([10], 1), ([0, 1, 4, 6, 7], 2), ([0, 7, 10], 3), ([8, 12, 13], 4), ([14], 2)):
        table = TokenTable()
        runner = static_runner(model, BatchLimits(rows, 64, 4096), static_step.run_eagerly)
        made = [row for index, row in enumerate(rows_of(model, seed, rows * len(WAYS))) if index % len(WAYS) in ways]
        made = made[:rows]
        whole = [WholePrompt(row.number, len(row.prompt), -1) for row in made]
        with torch.no_grad():
            logits_BV = runner.run(Step(0, whole=whole, chunk=[token for row in made for token in row.prompt]))
            for _ in range(2):
                _take(made, logits_BV, table)
                counts.clear()
                logits_BV = runner.run(Step(0, tokens=[row.new[-1] for row in made]))
                _take(made, logits_BV, table)
        waits, copied, pinned = (counts[each] for each in ("waits", "copies", "through pinned memory"))
        print(f"{rows} rows, ways {ways}: {waits} waits, {copied} copies")
        assert (waits, copied) == (1, pinned) and counts["reads through pinned memory"] == 1
        assert pinned <= copies + any(row.ended for row in made)  # an ended row does not sample


def test_tokens_are_read_by_one_copy_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read into other memory would wait for a second copy on the host. The stand-ins do not show the speed."""
    log: list[Any] = []

    class Held:
        def copy_(self, x: Any, non_blocking: bool) -> None:
            log.append(("copy", x, non_blocking))

    def empty(shape: Any, dtype: Any, pin_memory: bool) -> Held:
        log.append(("empty", shape, dtype, pin_memory))
        return Held()

    stream = SimpleNamespace(synchronize=lambda: log.append("wait"))
    monkeypatch.setattr(static_step.torch, "empty", empty)
    monkeypatch.setattr(static_step.torch.cuda, "current_stream", lambda device: stream)
    x: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(3, 2), dtype=torch.long)
    assert isinstance(static_step.to_host(x), Held)
    assert log == [("empty", (3, 2), torch.long, True), ("copy", x, True), "wait"]


def _count(patch: pytest.MonkeyPatch, owner: Any, name: str, counts: Counter[str], what: str) -> None:
    own = getattr(owner, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        return own(*args, **kwargs)

    patch.setattr(owner, name, counting)


def _take(rows: list[Row], logits_BV: Any, table: TokenTable) -> None:
    for row, token in zip(rows, choose_tokens(rows, logits_BV, table), strict=True):
        assert (token is None) == row.ended
        if isinstance(token, int):
            row.take_token(token)
