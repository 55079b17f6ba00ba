"""``deploy=True``: the outputs of the undeployed model, from any thread; faults become exceptions in time."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TextIteratorStreamer

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import EngineError, messages, serialization
from oslo_models.deploy import options as serving
from oslo_models.deploy.process_executor import ProcessExecutor
from oslo_models.deploy.worker import _Log

from support import deployment, faults
from support.deployment import Collected, prompt
from support.faults import gone
from support.pool import Pool
from support.waiting import LIMIT, wait_until

TYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.stacks
def test_deployed_model_answers_as_the_undeployed_one(model: Any, whole: Any, seed: int) -> None:
    assert isinstance(model, GPT2LMHeadModel) and isinstance(model, transformers.GPT2LMHeadModel)
    assert model.config.n_embd == 48 and model.generation_config.eos_token_id == 1
    assert model.device == torch.device("cpu") and model.eval() is model
    batch = prompt(seed)
    for options in ({}, {"num_beams": 3}, {"logits_processor": [deployment.Never(5)]}):
        options = {"max_new_tokens": 12, "do_sample": False, **options}
        assert torch.equal(model.generate(**batch, **options), whole.generate(**batch, **options))
    stopping = {"stopping_criteria": [deployment.After(9)], "min_new_tokens": 2}
    assert model.generate(**batch, **stopping).shape[1] == 9
    output = model(**batch, labels=batch["input_ids"])
    expected = whole(**batch, labels=batch["input_ids"])
    torch.testing.assert_close(output.logits, expected.logits.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss.detach(), rtol=1e-5, atol=1e-5)
    assert set(model.memory_allocated()) == {"cpu:0", "cpu:1"}
    assert all(count > 1 << 20 for count in model.memory_chached().values())


def test_deployed_model_counts_and_is_neither_copied_nor_pickled(model: Any, whole: Any) -> None:
    assert model.num_parameters() == whole.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == whole.num_parameters(exclude_embeddings=True)
    assert model.num_parameters(only_trainable=True) == 0
    with pytest.raises(TypeError, match="a deployed model cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(pickle.PicklingError, match="its weights are in worker processes"):
        pickle.dumps(model)
    if not torch.cuda.is_available():
        # the last in a copy of a process that has asked torch for GPUs
        error = r"torch sees no GPU here|NVIDIA driver|Cannot re-initialize CUDA"
        with pytest.raises((AssertionError, RuntimeError), match=error):
            model.cuda()
    assert model.health()["healthy"]


def test_generation_config_of_the_application_reaches_the_workers(model: Any, whole: Any, seed: int) -> None:
    config = model.generation_config
    config.max_new_tokens, config.min_new_tokens, config.do_sample = 3, 3, False
    try:
        assert model.generate(**prompt(seed)).shape[1] == 10
    finally:
        config.max_new_tokens = config.min_new_tokens = None


@pytest.mark.stacks
def test_generate_samples_by_its_seed(model: Any, seed: int) -> None:
    options = {**prompt(seed), "do_sample": True, "max_new_tokens": 20}
    first = model.generate(**options, seed=5)
    assert torch.equal(first, model.generate(**options, seed=5))
    assert not torch.equal(first, model.generate(**options, seed=6))
    assert not torch.equal(model.generate(**options), model.generate(**options))


def test_single_caller_receives_replies_in_its_own_thread(model: Any, seed: int) -> None:
    """A lone caller receives its own answer, also after many have called at once."""
    given, engine, receivers = prompt(seed), model._engine, list[str]()
    dispatch = engine._dispatch
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: model(**given), range(12)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine,
            "_dispatch",
            lambda executor: (receivers.append(threading.current_thread().name), dispatch(executor)),
        )
        for _ in range(20):
            model(**given)
    assert receivers.count(threading.current_thread().name) >= 5


@pytest.mark.stacks
def test_generate_streams_tokens(model: Any, seed: int) -> None:
    streamer = Collected()
    out = model.generate(**prompt(seed, 1), max_new_tokens=15, do_sample=False, streamer=streamer)
    assert streamer.tokens == out[0].tolist() and streamer.ended

    class Numbers:
        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(token)} " for token in ids)

    reader = TextIteratorStreamer(Numbers(), skip_prompt=True)  # type: ignore[arg-type]
    call = {**prompt(seed, 1), "max_new_tokens": 5, "min_new_tokens": 5, "streamer": reader}
    thread = threading.Thread(target=model.generate, kwargs=call)
    thread.start()
    assert len("".join(reader).split()) == 5
    thread.join()


def test_generation_stops_when_its_streamer_raises(model: Any, seed: int) -> None:
    """The workers stop at the next tokens instead of computing unused results."""
    streamer = Collected(limit=12)
    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        slow = {"logits_processor": [deployment.Trouble("sleep", 0)]}
        model.generate(**prompt(seed, 1), max_new_tokens=400, min_new_tokens=400, streamer=streamer, **slow)
    model.generate(**prompt(seed), max_new_tokens=2)
    assert streamer.ended and time.monotonic() - began < 19  # 400 tokens take 20 s at least


def test_generate_raises_after_its_timeout(model: Any, seed: int) -> None:
    slow = {"logits_processor": [deployment.Trouble("sleep", 0)], "max_new_tokens": 400, "min_new_tokens": 400}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"timeout=0\.5 s"):
        model.generate(**prompt(seed), **slow, timeout=0.5)
    assert time.monotonic() - began < 19  # 400 tokens take 20 s at least
    assert model.generate(**prompt(seed), max_new_tokens=2, min_new_tokens=2, timeout=LIMIT).shape[1] == 9


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": 1e-40}, "temperature=1e-40 is out of the range"),
        ({"temperature": float("inf")}, "temperature=inf is out of the range"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300 is out of the range"),
        ({"repetition_penalty": 10**400}, "repetition_penalty=10000"),
        ({"top_p": float("nan")}, "top_p=nan is not finite"),
        ({"sequence_bias": {(5,): float("nan")}}, "sequence_bias has nan"),
        ({"sequence_bias": {(5,): float("inf")}}, "sequence_bias has inf"),
        ({"sequence_bias": [[[5], 1e300]]}, "sequence_bias has 1e\\+300"),
        ({"generation_config": transformers.GenerationConfig(temperature=1e-40)}, "temperature=1e-40"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"timeout": "soon"}, "timeout must be"),
        ({"seed": 2**70}, "seed must be"),
        ({"seed": "x"}, "seed must be"),
    ],
)
def test_generation_options_out_of_range_are_rejected(
    model: Any, options: dict[str, Any], text: str, seed: int
) -> None:
    """The application refuses them, because sampling from NaN ends a GPU's process."""
    with pytest.raises(ValueError, match=text):
        model.generate(**prompt(seed), max_new_tokens=3, do_sample=True, **options)
    if options.keys() & {"timeout", "seed"}:
        with pytest.raises(ValueError, match=text):
            model(**prompt(seed), **options)
    usual = {"temperature": 1e-9, "sequence_bias": {(5,): -float("inf"), (6,): 100.0}, "repetition_penalty": 1.5}
    assert model.generate(**prompt(seed), max_new_tokens=3, min_new_tokens=3, do_sample=True, **usual).shape[1] == 10


@pytest.mark.stacks
def test_deployed_model_saves_a_merged_checkpoint(model: Any, whole: Any, tmp_path: Path) -> None:
    model.save_pretrained_with_parallel(tmp_path, save_with_merging=True)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())


def test_forked_child_can_neither_use_nor_end_the_workers(model: Any, seed: int) -> None:
    """A child process of the application cannot use its parent's workers, and does not end them."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            try:
                model.generate(**prompt(0))
            except EngineError as error:
                os.write(writer, str(error).encode())
            model.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert b"is a fork of" in os.read(reader, 1000)
    assert model.generate(**prompt(seed), max_new_tokens=2, min_new_tokens=2).shape[1] == 9


# What fails -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [name for name in faults.FAULTS if name != "disk full of logs"])
def test_fault_of_a_worker_raises_and_ends_all_workers(stand: faults.Stand, fault: str, seed: int) -> None:
    """Once; ``python -m benchmarks.faults`` tries each many times, with workers started as they are in use."""
    stand.rng.seed(seed)
    _, all_gone = faults.strike(stand, faults.FAULTS[fault])
    assert all_gone


@pytest.mark.parametrize("fault", ["worker killed in a call", "user code raises on one rank"])
def test_fault_while_the_caller_polls_raises_and_ends_all_workers(
    stand: faults.Stand, fault: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.answers()
    monkeypatch.setattr(stand.model._engine, "_spin_seconds", 60.0)
    stand.rng.seed(seed)
    _, all_gone = faults.strike(stand, faults.FAULTS[fault])
    assert all_gone


@pytest.mark.parametrize("awake", [0.0, 60.0])
def test_exception_of_a_signal_handler_leaves_the_deployment_working(
    model: Any, whole: Any, seed: int, awake: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler's exception during a call reaches the caller, and the model keeps answering."""
    monkeypatch.setattr(model._engine, "_spin_seconds", awake)
    slow = {"max_new_tokens": 400, "min_new_tokens": 400, "logits_processor": [deployment.Trouble("sleep", 0)]}

    def ring(*_: object) -> None:
        raise TimeoutError("too late")

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        for call in (slow, {"max_new_tokens": 400, "min_new_tokens": 400}):  # the second one's workers are faster
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(TimeoutError, match="too late"):
                model.generate(**prompt(seed), **call)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**prompt(seed), **options), whole.generate(**prompt(seed), **options))


def test_stopped_worker_blocks_no_call_beyond_its_timeout(stand: faults.Stand, seed: int) -> None:
    """No caller waits longer than its timeout, for any amount of sent data, and ending the worker works."""
    stand.answers()
    model, pids = stand.model, stand.pids
    os.kill(pids[0], signal.SIGSTOP)
    while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":  # soon, but not at once
        time.sleep(0.001)
    try:
        wait_until(lambda: model.health(0.2)["reason"] == "ranks [0] did not answer within 0.2 s")
        for _ in range(2):
            with pytest.raises(TimeoutError):
                model(inputs_embeds=torch.zeros(16, 400, 48), timeout=0.2)  # more than fits into a socket
        wait_until(lambda: model.health(0.2)["reason"] == "ranks [0] did not answer within 0.2 s")
    finally:
        model.close()
    assert gone(pids)
    with pytest.raises(EngineError, match=r"it was closed; model.restart\(\) starts it again"):
        model.generate(**prompt(seed))
    assert model.health() == {"healthy": False, "reason": "it was closed", "ranks": []}
    model.restart()
    assert model.health()["healthy"]


def test_failed_loading_raises_and_ends_the_workers(pool: Pool, stand: faults.Stand) -> None:
    made: list[Any] = []

    class Kept(ProcessExecutor):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            made[:] = self.pids

    class Alarmed(Kept):
        def wait(self, timeout: float, awake: float = 0.0) -> None:
            raise TimeoutError("too late")  # like a signal handler

    options: dict[str, Any] = {"tensor_parallel_size": 2, "deploy": True}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(MemoryError, match="no room for the weights") as caught:
        patch.setattr(serving, "ProcessExecutor", Kept)
        deployment.FailsToLoad.from_config_with_parallel(deployment.CONFIG, **options)
    assert f"raised by rank 1 (pid {made[1]})" in str(caught.value.__cause__)
    assert gone(made)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError, match="too late"):
        patch.setattr(serving, "ProcessExecutor", Alarmed)
        GPT2LMHeadModel.from_config_with_parallel(deployment.CONFIG, **options)
    assert gone(made)


def test_messages_that_cannot_be_read_or_written_become_errors() -> None:
    """An unreadable message fails its call; an error that cannot be sent becomes its base class."""
    data = serialization.encode(messages.Reply(7), 7)
    failure = serialization.decode(data[:8] + b"no pickle")
    assert (failure.number, type(failure.error)) == (7, serialization.pickle.UnpicklingError)
    with pytest.raises(TypeError, match="Point is not in the table of messages"):
        serialization.encode(NamedTuple("Point", [("x", int)])(1))

    tensors = [torch.tensor(3), torch.ones(2, 0), torch.eye(3, dtype=torch.bool).T, torch.arange(6.0)[::2].bfloat16()]
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tensors += [torch.ones(2, requires_grad=True), conjugate, torch._neg_view(torch.ones(2)), torch.eye(2).to_sparse()]
    found = serialization.decode(serialization.encode(messages.Reply(7, tensors))).result
    for mine, right in zip(found, tensors, strict=True):
        assert mine.dtype == right.dtype and torch.equal(mine.to_dense(), right.to_dense())
    assert len(serialization.encode(messages.Reply(7, torch.zeros(10_000)[:1]))) < 1000
    data = serialization.encode(messages.Reply(7, (torch.zeros(10_000), torch.ones(1))))
    holders = sys.getrefcount(data)
    kept = serialization.decode(data).result[1]
    assert sys.getrefcount(data) == holders and kept.untyped_storage().nbytes() == 4  # the other is freed

    class Odd(UnicodeDecodeError):
        pass

    odd = serialization.portable(Odd("utf-8", b"x", 0, 1, "here"))
    assert isinstance(odd, ValueError) and "here" in str(odd)
    with open("/dev/full", "wb", buffering=0) as full:
        log = _Log(full, "utf-8", line_buffering=True)
        assert log.write("x\n" * 9000) == 18000
        log.flush()
        log.detach()


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same type, content and order of keys, also inside of containers."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
held = st.builds(
    lambda size, dtype: torch.arange(2 * size).to(dtype).view(size, 2).T, st.integers(0, 3), st.sampled_from(TYPES)
)
nested = st.recursive(
    plain | held | st.builds(OrderedDict, x=held),
    lambda items: (
        st.lists(items, max_size=3)
        | st.lists(items, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), items, max_size=3)
    ),
    max_leaves=10,
)


@given(nested)
def test_messages_keep_types_values_and_order(value: Any) -> None:
    message = messages.Request(7, "forward", (value,), {"value": value}, 1)
    assert same(tuple(serialization.decode(serialization.encode(message))), tuple(message))
