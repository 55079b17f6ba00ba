"""The running batch: every call gets the same tokens as alone, for any other calls in the batch."""

from __future__ import annotations

import itertools
import queue
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from oslo_models import GPT2LMHeadModel, registry
from oslo_models.deploy import engine
from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.messages import Failure, Request, Reused
from oslo_models.deploy.running_batch import admission
from oslo_models.deploy.running_batch.admission import SINCE, TEXT_ONLY
from oslo_models.deploy.running_batch.encoder_decoders import EncoderDecoderRunner
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.loop import Messages, RunningBatch
from oslo_models.deploy.running_batch.plan_channel import SharedMemoryChannel
from oslo_models.deploy.running_batch.prompt_images import BOTH_WAYS
from oslo_models.deploy.running_batch.runners import runner_of
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.step import Step, WholePrompt
from oslo_models.deploy.running_batch.step_runner import StepRunner

from support import deployment, running, zoo
from support.deployment import Collected, prompt
from support.float64 import lifted_casts
from support.pool import Pool
from support.waiting import LIMIT

pytestmark = pytest.mark.drawn(14, of="file")

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "deployment.md"


NEWER = zoo.cases(each for each in ("minimax_m3_vl_text", "qwen4_exp_text") if running.is_decoder(each))
DECODERS = [variant for variant in (*zoo.FOUNDING, *zoo.MORE) if running.is_decoder(variant)]
ENCODER_DECODERS = [variant for variant in (*zoo.FOUNDING, *zoo.MORE) if running.encoder_decoder(variant)]
JOINING = sorted({variant for variant in ENCODER_DECODERS if admission.reason_against(zoo.config(variant)) is None})


# Without workers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("variant", ["gpt2", "llama", "bamba", "jamba", "deepseek_v32", "glm_moe_dsa-shared"])
def test_calls_get_their_own_tokens(pool: Pool, tmp_path: Path, seed: int, variant: str, sizes: dict[str, int]) -> None:
    running.compare(pool, variant, tmp_path, seed, **sizes)


@pytest.mark.zoo
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("variant", DECODERS)
def test_decoders_of_the_zoo_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, variant: str, axis: str
) -> None:
    if (reason := admission.reason_against(zoo.config(variant))) is not None:
        pytest.skip(reason)
    if axis == "pipeline_parallel_size":
        config = zoo.config(variant)
        plan = registry.find(running.head(variant, config)).plan(config)  # type: ignore[attr-defined]
        if plan.pipeline.single_stage_reason:
            pytest.skip(f"{variant} has one stage: {plan.pipeline.single_stage_reason}")
    running.compare(pool, variant, tmp_path, seed, 8, **{axis: 2})


@pytest.mark.parametrize(
    "sizes", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}]
)
@pytest.mark.parametrize("variant", ["t5", "bart"])
def test_calls_of_encoder_decoders_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, variant: str, sizes: dict[str, int]
) -> None:
    running.compare(pool, variant, tmp_path, seed, **sizes)


@pytest.mark.zoo
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("variant", [*JOINING, "longt5-global"])
def test_encoder_decoders_of_the_zoo_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, variant: str, axis: str
) -> None:
    cls: Any = registry.find(str(running.encoder_decoder(variant)))
    if axis == "pipeline_parallel_size" and (reason := cls.plan(zoo.config(variant)).pipeline.single_stage_reason):
        pytest.skip(f"{variant} has one stage: {reason}")
    running.compare(pool, variant, tmp_path, seed, 8, **{axis: 2})


DECODING = {
    name: variant for variant in (*JOINING, "trocr") for name in zoo.lm_heads(variant) if name.endswith("ForCausalLM")
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", DECODING)
def test_decoders_of_encoder_decoders_get_their_own_tokens(pool: Pool, tmp_path: Path, seed: int, name: str) -> None:
    """Their positions are looked up for each row."""
    running.compare(pool, DECODING[name], tmp_path, seed, 8, name=name, tensor_parallel_size=2)


def check_rows(name: str, folder: Path, sizes: dict[str, int], case: tuple[list[list[int]], Any, Any]) -> None:
    """Compare the logits of rows with transformers'. Rows join together and alone, leave and are copied."""
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder, dtype=torch.float64, **sizes).eval()
    prompts, tokens_BL, expected_BLV = case
    runner, slots = runner_of(model, running.LIMITS, keeps_logits=True), list[list[int]]()  # row, tokens computed

    def run(step: Step, joining: Sequence[int] = ()) -> None:
        for slot in step.leaving:
            slots[slot] = slots[-1]
            slots.pop()
        joined = [[row, 0] for row in joining]
        slots.extend(joined)
        if not joining:
            step.tokens = [int(tokens_BL[row, count]) for row, count in slots]
        logits_BV = runner.run(step)
        assert logits_BV is not None and len(logits_BV) in (0, len(joined or slots))
        for each, logits_V in itertools.zip_longest(joined or slots, logits_BV):
            if logits_V is not None:  # on the last stage
                torch.testing.assert_close(logits_V, expected_BLV[each[0], each[1]], rtol=1e-10, atol=1e-10)
            each[1] += 1

    def join(*joining: int, leaving: Sequence[int] = ()) -> None:
        own = [[int(tokens_BL[row, 0]), *prompts[row]] for row in joining]
        step = Step(0, leaving=[*leaving], chunk=[token for each in own for token in each])
        if len(own) > 1:
            step.whole = [WholePrompt(0, len(each), -1) for each in own]
        else:
            step.begins = step.joins = True
        run(step, joining)

    with torch.no_grad(), lifted_casts():
        join(0, 1)
        run(Step(0))
        run(Step(0, leaving=[0]))
        join(2)  # the longest prompt
        run(Step(0))
        join(3)
        run(Step(0))
        run(Step(0, leaving=[1]))
        runner.fork(0, 1)
        slots.append([*slots[0]])
        run(Step(0))
        run(Step(0, leaving=[0]))
        join(4, 0, leaving=[0, 0])
        run(Step(0))


@torch.no_grad()
def rows_of(variant: str, folder: Path, seed: int) -> tuple[str, tuple[list[list[int]], Any, Any]]:
    """Save an encoder-decoder. Return its class, prompts of several lengths, decoder tokens, and their logits."""
    name, *_ = running.checked(variant, folder, seed, 1)
    whole = zoo.original(name).from_pretrained(folder, dtype=torch.float64).eval()
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 90) for _ in range(length)] for length in (7, 3, 11, 4, 6)]
    tokens_BL = torch.tensor([[draw.randrange(3, 90) for _ in range(12)] for _ in prompts])
    with lifted_casts():
        logits = [
            whole(input_ids=torch.tensor([ids]), decoder_input_ids=tokens_BL[row : row + 1]).logits[0]
            for row, ids in enumerate(prompts)
        ]
    return name, (prompts, tokens_BL, torch.stack(logits))


@pytest.mark.parametrize("variant", ["t5", "bart"])
def test_rows_read_their_own_prompts(tmp_path: Path, seed: int, variant: str) -> None:
    name, case = rows_of(variant, tmp_path, seed)
    check_rows(name, tmp_path, {"tensor_parallel_size": 1}, case)


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize("variant", ["t5", "bart"])
def test_rows_read_their_own_prompts_on_ranks(
    pool: Pool, tmp_path: Path, seed: int, variant: str, sizes: dict[str, int]
) -> None:
    name, case = rows_of(variant, tmp_path, seed)
    pool.run(max(sizes.values()), check_rows, name, tmp_path, sizes, case)


def test_every_decoder_of_the_zoo_joins_or_has_a_reason() -> None:
    """Decoders join if their cache in transformers has known layers only, unless the table gives a reason."""
    # the last kind, of newer versions, reads the keys of another block
    plain = {DynamicLayer, DynamicSlidingWindowLayer, getattr(transformers.cache_utils, "DummyLayer", DynamicLayer)}
    plain |= {DynamicIndexedLayer}
    excluded, stateful = set(), set()
    for variant in DECODERS:
        config = zoo.config(variant)
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        states = {type(layer) for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)}
        others = {type(layer) for layer in layers if not hasattr(layer, "update_index")}  # of MiniMax-M3
        excluded |= {variant} if others - plain - states else set()
        stateful |= {variant} if states else set()
    assert excluded and len(stateful) > 20 and len(DECODERS) > 60
    reasons = {variant for variant in DECODERS if admission.reason_against(zoo.config(variant))}
    assert reasons == excluded | (stateful - admission.WITH_STATES) | (
        {*DECODERS} & (SINCE | admission.EXCLUSIVE.keys())
    )
    assert admission.IN_ONE_STEP <= admission.WITH_STATES
    assert admission.WITH_STATES & {*DECODERS} - SINCE <= stateful
    assert documented("why it does not join") == {zoo.config(variant).model_type for variant in reasons - SINCE}
    assert (
        documented("why its images do not join") == TEXT_ONLY.keys() & registry.ARCHITECTURES.keys() - BOTH_WAYS.keys()
    )


def documented(title: str) -> set[str]:
    """Return the types in a table of the guide that the installed transformers has."""
    table = GUIDE.read_text().partition(f"| decoder | {title} |")[2].partition("\n\n")[0]
    found = set(re.findall(r"`([^`]+)`", table))
    assert found
    return found - registry.NEWER.keys()


def test_encoder_decoders_that_join_are_in_the_guide() -> None:
    assert {zoo.config(variant).model_type for variant in JOINING} == admission.ENCODER_DECODERS
    listed = GUIDE.read_text().partition("* **Encoder-decoders**: ")[2].partition("\n* ")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) >= admission.ENCODER_DECODERS | admission.CANNOT_JOIN.keys()
    assert admission.CANNOT_JOIN.keys() <= {zoo.config(variant).model_type for variant in ENCODER_DECODERS}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 6)), max_size=12), st.integers(1, 4))
def test_schedule_is_fair_and_bounded(calls: list[tuple[int, int, int]], slots: int) -> None:
    """Each prompt is computed once, in order of arrival; rows wait for a chunk at most and then leave their slot."""

    class Row:
        def __init__(self, number: int, prompt: int, wanted: int) -> None:
            self.number, self.prompt, self.wanted = number, list(range(prompt)), wanted
            self.keys, self.images, self.tenant, self.adapter = self.prompt, None, 0, 0
            self.new: list[int] = []
            self.ended = False

    scheduler, slotted, computed, begun = Scheduler(slots, 3), list[Any](), {}, list[int]()
    step_number = since = 0
    arrivals = [(when, Row(number, prompt, new)) for number, (prompt, new, when) in enumerate(calls)]
    while arrivals or not scheduler.is_idle:
        for arrival in [each for each in arrivals if each[0] <= step_number]:
            arrivals.remove(arrival)
            scheduler.add(arrival[1])
        step, step_number = scheduler.plan(step_number), step_number + 1
        assert step_number < 500, "it does not come to its end"
        for slot in step.leaving:
            assert slotted[slot].ended
            slotted[slot] = slotted[-1]
            slotted.pop()
        assert not any(row.ended for row in slotted)
        padded = len(step.whole) * max((prompt.length for prompt in step.whole), default=0) or len(step.chunk)
        since = padded + (0 if step.tokens or not slotted else since)
        assert step.tokens == ([] if step.chunk else [row.new[-1] for row in slotted]) and since <= 3
        decoded = slotted[: len(step.tokens)]
        chunk = list(step.chunk)
        for number, length, *_ in step.whole:
            begun.append(number)
            computed[number], chunk = chunk[:length], chunk[length:]
            slotted.append(scheduler.rows[len(slotted)])
            assert slotted[-1].number == number and computed[number] == slotted[-1].prompt
        if chunk:
            assert len(step.chunk) <= 3 and step.begins == (not computed.get(step.number))
            begun += [step.number] if step.begins else []
            computed[step.number] = [*computed.get(step.number, []), *step.chunk]
        if step.joins:
            slotted.append(scheduler.rows[-1])
            assert computed[step.number] == slotted[-1].prompt
        assert slotted == scheduler.rows and len(slotted) <= slots
        for row in decoded + slotted[len(slotted) - step.joining :]:
            row.new.append(len(row.new))
            row.ended = len(row.new) == row.wanted
    assert sorted(begun) == list(range(len(calls)))
    assert begun == sorted(begun, key=lambda number: (calls[number][2], number))


def kept_logits(folder: Any) -> list[tuple[int, ...]]:
    """On a rank, compare kept logits with shared logits; return the shapes for a prompt and for a row."""
    model: Any = registry.find("LlamaForCausalLM").from_pretrained_with_parallel(  # type: ignore[attr-defined]
        folder, dtype=torch.float64, pipeline_parallel_size=2
    )
    steps = [Step(0, chunk=[5, 7, 11], begins=True, joins=True, number=1), Step(0, tokens=[13])]
    shapes = []
    with torch.no_grad():
        runners = [StepRunner(model.eval(), running.LIMITS, keeps_logits=keeps) for keeps in (False, True)]
        for step in steps:
            shared_BV, kept_BV = (runner.run(step) for runner in runners)
            assert torch.equal(shared_BV[: len(kept_BV)], kept_BV)
            shapes.append((len(shared_BV), len(kept_BV)))
    return shapes


def test_logits_stay_on_the_last_stage(pool: Pool, tmp_path: Path, seed: int) -> None:
    running.checked("llama", tmp_path, seed, 1)
    assert pool.run(2, kept_logits, tmp_path) == [[(1, 0)] * 2, [(1, 1)] * 2]


@pytest.mark.parametrize("variant", ["bamba", "falcon_h1", "xlstm", "deepseek_v32", *NEWER])
@torch.no_grad()
def test_rows_have_their_own_states(tmp_path: Path, seed: int, variant: str) -> None:
    """In slots and prompts that had other rows before: rows join together and in chunks, leave, and are continued."""
    name, *_ = running.checked(variant, tmp_path, seed, 1)
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(tmp_path, dtype=torch.float64, tensor_parallel_size=1).eval()
    ids_BL = torch.randint(3, 90, (5, 12), generator=torch.Generator().manual_seed(seed))
    rows, computed, runner = [*range(4)], [0] * 4, StepRunner(model, running.LIMITS)

    def run(step: Step, joining: list[int] | None = None, length: int = 1) -> None:
        """Run a step after which ``joining``, or all rows, have ``length`` tokens more; check their logits."""
        logits_BV = runner.run(step)
        assert logits_BV is not None
        for row, logits_V in zip(rows if joining is None else joining, logits_BV, strict=True):
            computed[row] += length
            expected_BLV = model(ids_BL[row : row + 1, : computed[row]]).logits
            torch.testing.assert_close(logits_V, expected_BLV[0, -1], rtol=1e-10, atol=1e-10)

    def decode(leaving: Sequence[int] = ()) -> None:
        for slot in leaving:
            rows[slot] = rows[-1]
            rows.pop()
        run(Step(0, leaving=[*leaving], tokens=[int(ids_BL[row, computed[row]]) for row in rows]))

    with lifted_casts():
        rows.clear()
        whole = [WholePrompt(0, 5, -1)] * 2
        run(Step(0, chunk=ids_BL[:2, :5].flatten().tolist(), whole=whole), [0, 1], 5)
        rows += [0, 1]
        decode()
        for row, leaving in ((2, []), (3, [0])):
            for slot in leaving:
                rows[slot] = rows[-1]
                rows.pop()
            runner.run(Step(0, leaving=leaving, chunk=ids_BL[row, :3].tolist(), begins=True))
            computed[row] = 3
            run(Step(0, chunk=ids_BL[row, 3:6].tolist(), joins=True), [row], 3)
            rows.append(row)
            decode()
        slot = rows.index(1)
        ids_BL[0, : computed[1]] = ids_BL[1, : computed[1]]
        reused = computed[0] = computed[1]
        step = Step(0, leaving=[2], chunk=[int(ids_BL[0, reused])], begins=True, joins=True, source=slot, reused=reused)
        rows.pop()
        run(step, [0])
        rows.append(0)
        decode()


def failing_stage(name: str, folder: Path, stages: int, failing: int, where: str, calls: list[Any]) -> list[Any]:
    """On a rank, return its messages for grouped calls during which a stage fails, and for one later call."""
    rank, sent = torch.distributed.get_rank(), list[Any]()
    model: Any = registry.find(name).from_pretrained_with_parallel(  # type: ignore[attr-defined]
        folder, dtype=torch.float64, pipeline_parallel_size=stages
    )
    channel = SharedMemoryChannel(folder / "steps", rank, stages - 1, stages, 4096, stages)
    limits = admission.with_states(model.config, BatchLimits(2 * stages, 64, 8))

    def send(message: Any, number: int) -> None:
        sent.append(message)

    batch = RunningBatch(model.eval(), limits, channel, rank == stages - 1, send, set(), lambda: None, stages)
    requests = [
        Request(number, "generate", (), {key: call[key] for key in call.keys() - {"seed"}}, call["seed"], joins=True)
        for number, call in enumerate(calls)
    ]
    inbox: Any = queue.SimpleQueue()
    for request in requests[1:-1]:
        inbox.put(request)
    encodes = where.endswith("encoder")
    patched, method = (EncoderDecoderRunner, "_begin_rows") if encodes else (StepRunner, "_forward")
    count, forward, last = itertools.count(1), getattr(patched, method), 2 if encodes else 8

    def breaks(*args: Any) -> None:
        if next(count) == last:
            raise MemoryError("of one stage")

    def broken(*args: Any, **kwargs: Any) -> Any:
        breaks()
        return forward(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if rank == failing and where.startswith("before"):
            patch.setattr(patched, method, broken)
        elif rank == failing and encodes:
            model.get_encoder().block[0].register_forward_pre_hook(breaks)
        elif rank == failing:
            next(model.base_model.layers.children()).register_forward_pre_hook(breaks)
        batch.run(requests[0], Messages(inbox, pytest.fail))
    assert next(count) > last or rank != failing
    with torch.no_grad():
        batch.run(requests[-1], Messages(inbox, pytest.fail))
    assert not batch._ahead and not any(runner.calls() for runner in batch.runners)
    return [(type(each), each.number, getattr(each, "result", None)) for each in sent if not isinstance(each, Reused)]


@pytest.mark.parametrize("where", ["before the model", "in the model"])
@pytest.mark.parametrize(("stages", "failing"), [(2, 0), (2, 1), (3, 1)])
def test_stage_that_fails_ends_the_calls_and_no_others(
    pool: Pool, tmp_path: Path, seed: int, stages: int, failing: int, where: str
) -> None:
    """Steps of other groups are in flight: every stage finishes them, and the next call is answered."""
    _, calls, expected = running.checked("llama", tmp_path, seed, 1, num_hidden_layers=3)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "seed": 0}
    calls = [{**prompt(seed + number, 1), **options} for number in range(5)] + calls
    found = pool.run(stages, failing_stage, "LlamaForCausalLM", tmp_path, stages, failing, where, calls)
    check_failed(found, failing, expected[0])


def check_failed(found: list[list[Any]], failing: int, expected: torch.Tensor) -> None:
    *others, last = found
    (_, number, result), failed = last[-1], last[:-1]
    assert number == 5 and torch.equal(result, expected)
    assert [kind for kind, *_ in failed] == [Failure] * 5 and {number for _, number, _ in failed} == set(range(5))
    for rank, sent in enumerate(others):  # the failing stage and later stages report their calls
        assert all(kind is Failure for kind, *_ in sent) and bool(sent) is (rank >= failing)


@pytest.mark.parametrize(
    ("failing", "where"), [(0, "before the encoder"), (1, "before the encoder"), (0, "in the encoder")]
)
def test_stage_that_fails_to_encode_ends_the_calls_and_no_others(
    pool: Pool, tmp_path: Path, seed: int, failing: int, where: str
) -> None:
    name, calls, expected = running.checked("t5", tmp_path, seed, 1)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "seed": 0}
    calls = [{**prompt(seed + number, 1), **options} for number in range(5)] + calls
    found = pool.run(2, failing_stage, name, tmp_path, 2, failing, where, calls)
    *_, (_, number, result) = found[-1]
    assert number == 5 and torch.equal(result, expected[0])
    failed = {(kind, number) for sent in found for kind, number, _ in sent if number < 5}
    assert failed == {(Failure, number) for number in range(5)}


# With workers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(stand: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A GPT-2 in float64 on two ranks with small limits, and the full model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("served")
    whole = transformers.GPT2LMHeadModel(deployment.CONFIG).double().eval()
    whole.save_pretrained(folder)
    options: dict[str, Any] = {"dtype": torch.float64, "max_batch_size": 4, "prefill_chunk_size": 5}
    with GPT2LMHeadModel.from_pretrained_with_parallel(folder, tensor_parallel_size=2, deploy=True, **options) as made:
        yield made, whole


def ask(model: Any, call: dict[str, Any], expected: torch.Tensor) -> None:
    """Check that a call, streamed or not, gets the tokens of transformers."""
    if call["max_new_tokens"] % 2 and len(call["input_ids"]) == 1:
        streamer = Collected()
        found = model.generate(**call, streamer=streamer)
        assert streamer.tokens == expected[0].tolist() and streamer.ended
    else:
        found = model.generate(**call)
    assert found.tolist() == expected.tolist(), call


def test_threads_get_the_answers_of_a_single_thread(served: Any, seed: int) -> None:
    """Mix greedy and sampled calls, streamed or not, with calls that cannot join: beams, forwards, two sampled rows."""
    model, whole = served
    calls, batch = running.requests(random.Random(seed), 20), prompt(seed)
    for way in ({"num_beams": 2}, {"do_sample": True}):
        calls.insert(9, {**batch, "max_new_tokens": 4, "seed": seed % 1000, "pad_token_id": 0, **way})
    expected = [running.alone(whole, call) for call in calls]
    logits = whole(**batch).logits.detach()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, model, *each) for each in zip(calls, expected, strict=True)]
        for _ in range(3):
            torch.testing.assert_close(model(**batch).logits, logits, rtol=1e-10, atol=1e-10)
        for each in asked:
            each.result(LIMIT)
    assert model.health()["healthy"]


@pytest.mark.parametrize(
    "sizes",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 1},
        {"tensor_parallel_size": 2, "master_addr": "127.0.0.1"},  # like several hosts: steps are broadcast
    ],
)
def test_stages_one_rank_and_ranks_without_shared_memory(
    stand: Any, tmp_path: Path, seed: int, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "master_addr" in sizes:
        monkeypatch.setattr(engine, "LOOPBACK", "another address")
    name, calls, expected = running.checked("llama", tmp_path, seed, 8)
    cls: Any = registry.find(name)
    options: dict[str, Any] = {"dtype": torch.float64, "max_batch_size": 3, "deploy": True, **sizes}
    with cls.from_pretrained_with_parallel(tmp_path, **options) as model, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, model, *each) for each in zip(calls, expected, strict=True)]
        beams = model.generate(**prompt(seed), max_new_tokens=3, num_beams=2)  # on all ranks, between two steps
        for each in asked:
            each.result(LIMIT)
        assert torch.equal(beams, model.generate(**prompt(seed), max_new_tokens=3, num_beams=2))


@pytest.mark.parametrize(
    ("variant", "sizes"), [("t5", {"pipeline_parallel_size": 2}), ("bart", {"tensor_parallel_size": 2})]
)
def test_encoder_decoders_share_a_batch(
    stand: Any, tmp_path: Path, seed: int, variant: str, sizes: dict[str, Any]
) -> None:
    name, calls, expected = running.checked(variant, tmp_path, seed, 8)
    cls: Any = registry.find(name)
    options: dict[str, Any] = {"dtype": torch.float64, "max_batch_size": 3, "deploy": True, **sizes}
    with cls.from_pretrained_with_parallel(tmp_path, **options) as model, ThreadPoolExecutor(4) as threads:
        assert all(model.can_join(**{key: call[key] for key in call.keys() - {"seed"}}) for call in calls)
        held = model.reserve_batch()
        asked = [threads.submit(ask, model, *each) for each in zip(calls, expected, strict=True)]
        beams = model.generate(**prompt(seed), max_new_tokens=3, num_beams=2)  # on all ranks, between two steps
        for each in asked:
            each.result(LIMIT)
        assert torch.equal(beams, model.generate(**prompt(seed), max_new_tokens=3, num_beams=2))
        assert len(held) == 2 and all(held.values()) and model.reserve_batch() == held


def test_row_that_fails_or_is_cancelled_leaves_the_others(served: Any, seed: int) -> None:
    model, whole = served
    long = {"max_new_tokens": 80, "min_new_tokens": 80, "do_sample": False}
    cancellation, batch = Cancellation(), prompt(seed, 1)
    expected = whole.generate(**batch, **long)
    with ThreadPoolExecutor(8) as threads:
        slow = {"logits_processor": [deployment.Trouble("sleep", 0)]}
        good = [threads.submit(model.generate, **batch, **long) for _ in range(2)]
        raising = threads.submit(model.generate, **batch, **long, logits_processor=[deployment.Trouble("raise", 0)])
        cancelled = threads.submit(model.generate, **batch, **long, **slow, cancellation=cancellation)
        late = threads.submit(model.generate, **batch, **long, **slow, timeout=0.3)
        left = threads.submit(model.generate, **batch, **long, streamer=Collected(limit=9))
        unknown = {"input_ids": torch.tensor([[5, 500]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}
        with pytest.raises(IndexError, match="the token 500; the vocabulary has 101"):
            model.generate(**unknown, **long)
        with pytest.raises(MemoryError, match="no room for the cache"):
            raising.result(LIMIT)
        with pytest.raises(TimeoutError, match=r"timeout=0\.3 s"):
            late.result(LIMIT)
        with pytest.raises(BrokenPipeError):
            left.result(LIMIT)
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            cancelled.result(LIMIT)
        assert all(torch.equal(each.result(LIMIT), expected) for each in good)
    assert torch.equal(model.generate(**batch, **long), expected)


def test_memory_is_reserved_and_described(served: Any, seed: int) -> None:
    model, whole = served
    sizes = model.reserve_batch()
    # keys and values of 2 layers and 24 of 48 channels on each rank, for 4 rows and a prompt of 512 positions and room
    assert sizes == {f"cpu:{rank}": 2 * 2 * 24 * 8 * (4 + 1) * (512 + 64) for rank in range(2)}
    assert model.describe_batch() == (
        "a running batch of 4 rows of up to 512 tokens, 2.2 MB on cpu:0, 2.2 MB on cpu:1; prompts reuse former prefixes"
    )
    call = {**prompt(seed), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**call), whole.generate(**call))


def test_short_call_overtakes_a_long_one(served: Any, seed: int) -> None:
    """It joins while the long call is computed; with dynamic batching it would wait."""
    model, _ = served
    slow = {"logits_processor": [deployment.Trouble("sleep", 0)], "max_new_tokens": 200, "min_new_tokens": 200}
    cancellation, batch = Cancellation(), prompt(seed, 1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(model.generate, **batch, **slow, cancellation=cancellation)
        time.sleep(0.2)
        assert model.generate(**batch, max_new_tokens=3, min_new_tokens=3).shape[1] == 10
        assert not first.done()  # which takes more than 10 s
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            first.result(LIMIT)


def test_call_overtakes_beams(served: Any, seed: int) -> None:
    """On two ranks, beams let a call join after each token, and change nothing else."""
    model, whole = served
    beams = {**prompt(seed, 1), "num_beams": 2, "max_new_tokens": 60, "min_new_tokens": 60, "pad_token_id": 0}
    slow = {"logits_processor": [deployment.Trouble("sleep", 0)]}
    expected, short = whole.generate(**beams), {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(model.generate, **beams, **slow)
        time.sleep(0.2)
        for number in range(3):
            call = {**prompt(seed + number, 1), **short}
            assert torch.equal(model.generate(**call), whole.generate(**call)) and not first.done()
        assert torch.equal(first.result(LIMIT), expected)


def test_change_of_the_model_waits_for_the_rows(served: Any, seed: int) -> None:
    """Rows finish with their old model; calls after the change start with the new one."""
    model, whole = served
    batch, slow = prompt(seed, 1), {"logits_processor": [deployment.Trouble("sleep", 0)], "do_sample": False}
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = whole.generate(**batch, **options)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(model.generate, **batch, **{**options, **slow})
        time.sleep(0.15)
        changing = threads.submit(model.fuse)
        time.sleep(0.05)
        assert torch.equal(model.generate(**batch, **options), expected) and changing.result(LIMIT) is model
        assert torch.equal(first.result(LIMIT), expected)
    model.unfuse()


def test_step_that_fails_ends_its_calls_and_no_others(served: Any, seed: int) -> None:
    """A forward that fails on every rank raises in the calls of the batch; later calls are answered."""
    model, whole = served
    model._engine.limits = BatchLimits(4, 4096, 5)  # beyond the positions of the model
    batch = prompt(seed, 1, 500)
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(model.generate, **batch, max_new_tokens=n, min_new_tokens=n) for n in (20, 30)]
        for call in calls:
            with pytest.raises((IndexError, RuntimeError)):
                call.result(LIMIT)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**prompt(seed), **options), whole.generate(**prompt(seed), **options))


def test_channel_is_read_in_order_and_settles(tmp_path: Path) -> None:
    """With a thread as the follower, even a fast leader loses nothing, and an absent follower is noticed."""
    leader, follower = (SharedMemoryChannel(tmp_path / "steps", rank, 0, 2, 4096) for rank in (0, 1))
    read: list[Step] = []

    def follow() -> None:
        while not read or not read[-1].idle:
            read.append(follower.receive())

    steps = [Step(number, tokens=list(range(number % 7))) for number in range(200)] + [Step(0, idle=True)]
    thread = threading.Thread(target=follow)
    thread.start()
    for step in steps:
        leader.publish(step)
    assert leader.settles(5)
    thread.join()
    assert read == steps
    leader.publish(Step(1))
    assert not leader.settles(0.05)
    with pytest.raises(ValueError, match="exceeds the"):
        follower.receive()
        leader.publish(Step(1, tokens=list(range(1000))))
