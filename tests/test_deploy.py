"""``deploy=True``: the answers of the undeployed model, from any thread; whatever fails is an exception soon."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import deployed
import pytest
import torch
import transformers
from torch import Tensor
from transformers import TextIteratorStreamer

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import EngineError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(deployed.CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Iterator[Any]:
    made = GPT2LMHeadModel.from_pretrained_with_parallel(checkpoint, tensor_parallel_size=2, deploy=True)
    yield made
    made.close()


def prompt(seed: int, rows: int = 2, length: int = 7) -> dict[str, Tensor]:
    ids = torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def gone(pids: list[int]) -> bool:
    """Whether all of these processes have ended, or do within two seconds."""
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


# What it answers ------------------------------------------------------------------------------------------------------


def test_is_the_model(model: Any, whole: Any, seed: int) -> None:
    assert isinstance(model, GPT2LMHeadModel) and isinstance(model, transformers.GPT2LMHeadModel)
    assert model.config.n_embd == 48 and model.generation_config.eos_token_id == 1
    assert model.device == torch.device("cpu") and model.eval() is model
    batch = prompt(seed)
    for options in ({}, {"num_beams": 3}, {"logits_processor": [deployed.Never(5)]}):
        options = {"max_new_tokens": 12, "do_sample": False, **options}
        assert torch.equal(model.generate(**batch, **options), whole.generate(**batch, **options))
    stopping = {"stopping_criteria": [deployed.After(9)]}
    assert model.generate(**batch, **stopping).shape[1] == 9
    output = model(**batch, labels=batch["input_ids"])
    expected = whole(**batch, labels=batch["input_ids"])
    torch.testing.assert_close(output.logits, expected.logits.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.loss, expected.loss.detach(), rtol=1e-5, atol=1e-5)
    assert set(model.memory_allocated()) == {"cpu:0", "cpu:1"}
    assert all(count > 1 << 20 for count in model.memory_chached().values())


def test_settings_of_the_application_reach_the_workers(model: Any, whole: Any, seed: int) -> None:
    config = model.generation_config
    config.max_new_tokens, config.do_sample = 3, False
    try:
        assert model.generate(**prompt(seed)).shape[1] == 10
    finally:
        config.max_new_tokens = None


def test_sampling_follows_the_seed(model: Any, seed: int) -> None:
    options = {**prompt(seed), "do_sample": True, "max_new_tokens": 20}
    first = model.generate(**options, seed=5)
    assert torch.equal(first, model.generate(**options, seed=5))
    assert not torch.equal(first, model.generate(**options, seed=6))
    assert not torch.equal(model.generate(**options), model.generate(**options))


def test_many_threads(model: Any, whole: Any, seed: int) -> None:
    """Every thread gets what it would get alone, and calls that wait are computed together."""
    prompts = [prompt(seed + i, 1, 3 + i % 9) for i in range(48)]
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = [whole.generate(**each, **options) for each in prompts]
    sent: list[int] = []
    original = model._engine.call

    def counted(method: str, *args: Any, **kwargs: Any) -> Any:
        sent.append(len(args[1]["input_ids"]))
        return original(method, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as threads:
        patch.setattr(model._engine, "call", counted)
        found = list(threads.map(lambda each: model.generate(**each, **options), prompts))
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine, right)
    assert sum(sent) == 48 and max(sent) <= 8 and len(sent) < 40


class Collected:
    def __init__(self, limit: float = float("inf")) -> None:
        self.tokens: list[int] = []
        self.limit, self.ended = limit, False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) > self.limit:
            raise BrokenPipeError("the reader has left")

    def end(self) -> None:
        self.ended = True


def test_streaming(model: Any, seed: int) -> None:
    streamer = Collected()
    out = model.generate(**prompt(seed, 1), max_new_tokens=15, do_sample=False, streamer=streamer)
    assert streamer.tokens == out[0].tolist() and streamer.ended

    class Words:
        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(f"{int(token)} " for token in ids)

    reader = TextIteratorStreamer(Words(), skip_prompt=True)  # type: ignore[arg-type]
    call = {**prompt(seed, 1), "max_new_tokens": 5, "min_new_tokens": 5, "streamer": reader}
    thread = threading.Thread(target=model.generate, kwargs=call)
    thread.start()
    assert len("".join(reader).split()) == 5
    thread.join()


def test_a_reader_who_leaves(model: Any, seed: int) -> None:
    """The workers stop at the next tokens instead of computing for nobody."""
    streamer = Collected(limit=12)
    began = time.monotonic()
    with pytest.raises(BrokenPipeError):
        slow = {"logits_processor": [deployed.Trouble("sleep", 0)]}
        model.generate(**prompt(seed, 1), max_new_tokens=400, min_new_tokens=400, streamer=streamer, **slow)
    model.generate(**prompt(seed), max_new_tokens=2)
    assert streamer.ended and time.monotonic() - began < 10  # 400 tokens would take 20 s


def test_timeout(model: Any, seed: int) -> None:
    slow = {"logits_processor": [deployed.Trouble("sleep", 1)], "max_new_tokens": 400, "min_new_tokens": 400}
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"timeout=0\.5 s"):
        model.generate(**prompt(seed), **slow, timeout=0.5)
    assert time.monotonic() - began < 2
    assert model.generate(**prompt(seed), max_new_tokens=2, min_new_tokens=2, timeout=30).shape[1] == 9


BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a number out of range": (lambda m: m.generate(**prompt(0), max_new_tokens=-3), ValueError, "max_new_tokens"),
    "an unknown setting": (lambda m: m.generate(**prompt(0), max_new_tokns=3), ValueError, "max_new_tokns"),
    "a token that there is not": (lambda m: m(input_ids=torch.tensor([[500]])), IndexError, "index"),
    "two inputs": (lambda m: m(**prompt(0), inputs_embeds=torch.zeros(2, 7, 48)), ValueError, "input_ids"),
    "a lambda": (lambda m: m.generate(**prompt(0), stopping_criteria=[lambda *_: 1]), ValueError, "importable by name"),
    "shapes that differ": (
        lambda m: m(input_ids=torch.ones(2, 3, dtype=torch.long), labels=torch.ones(3, 3, dtype=torch.long)),
        (ValueError, RuntimeError),  # type: ignore[dict-item]
        "batch",
    ),
    "too long": (lambda m: m(input_ids=torch.ones(1, 600, dtype=torch.long)), (IndexError, RuntimeError), "index|size"),  # type: ignore[dict-item]
    "beams and a streamer": (
        lambda m: m.generate(**prompt(0), num_beams=2, streamer=Collected()),
        ValueError,
        "streamer",
    ),
    "training": (lambda m: m.train(), RuntimeError, "cannot be trained"),
    "text": (lambda m: m.generate("text"), (ValueError, AttributeError, TypeError), "str"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_the_callers_problem(model: Any, what: str, seed: int) -> None:
    """It raises here what it raised there, and the next call is answered."""
    bad, kind, text = BAD[what]
    with pytest.raises(kind, match=text):
        bad(model)
    assert model.generate(**prompt(seed), max_new_tokens=2, min_new_tokens=2).shape[1] == 9


def test_saving(model: Any, whole: Any, tmp_path: Path) -> None:
    model.save_pretrained_with_parallel(tmp_path, save_with_merging=True)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())


def test_a_fork(model: Any, seed: int) -> None:
    """A child of the application cannot use its parent's workers, and does not end them."""
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
    assert b"forked" in os.read(reader, 1000)
    assert model.generate(**prompt(seed), max_new_tokens=2, min_new_tokens=2).shape[1] == 9


# What fails -----------------------------------------------------------------------------------------------------------


def test_workers_that_fail(checkpoint: Path, seed: int) -> None:
    """One after the other on one model that is restarted: killed, stopped, gone, and one that raises alone."""
    model = GPT2LMHeadModel.from_pretrained_with_parallel(
        checkpoint, tensor_parallel_size=2, pipeline_parallel_size=1, deployment=True
    )
    long = {"max_new_tokens": 400, "min_new_tokens": 400, "logits_processor": [deployed.Trouble("sleep", 0)]}
    pids = model._engine.pids
    threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank 1 \(pid {pids[1]}\) was killed by SIGKILL"):
        model.generate(**prompt(seed), **long)
    assert time.monotonic() - began < 5.5 and gone(pids)
    with pytest.raises(EngineError, match=r"SIGKILL; model.restart\(\) starts it again"):
        model.generate(**prompt(seed))
    assert not model.health()["healthy"]

    model.restart()
    pids = model._engine.pids
    assert model.health()["healthy"]
    os.kill(pids[0], signal.SIGSTOP)
    assert model.health(0.3)["reason"] == "ranks [0] did not answer within 0.3 s"
    with pytest.raises(TimeoutError):
        model.generate(**prompt(seed), timeout=0.5)
    os.kill(pids[0], signal.SIGCONT)
    with pytest.raises(MemoryError, match="no room for the cache") as caught:
        model.generate(**prompt(seed), logits_processor=[deployed.Trouble("raise", 1)], max_new_tokens=3)
    assert "raised by rank 1" in str(caught.value.__cause__)
    model.close()
    assert gone(pids)
    with pytest.raises(EngineError, match=r"ranks \[0\] did not end the same call; model.restart\(\) starts it again"):
        model.generate(**prompt(seed))


def test_loading_that_fails() -> None:
    before = workers()
    with pytest.raises(MemoryError, match="no room for the weights") as caught:
        deployed.FailsToLoad.from_config_with_parallel(deployed.CONFIG, tensor_parallel_size=2, deploy=True)
    assert "raised by rank 1" in str(caught.value.__cause__)
    assert workers() <= before


def workers() -> set[str]:
    """The workers of this process."""
    done = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "deploy.worker" in line}


SCRIPT = """
import sys, torch
from oslo_models import GPT2LMHeadModel
print("began", flush=True)
model = GPT2LMHeadModel.from_pretrained_with_parallel({checkpoint!r}, tensor_parallel_size=2, deploy=True)
print(*model._engine.pids, flush=True)
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3).shape[1], flush=True)
{rest}
"""


@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_script_without_guard(checkpoint: Path, how: str) -> None:
    """From standard input even: it runs once, and when it ends in whatever way, so do its workers."""
    rest = "" if how == "ends" else "import time; time.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    script = subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert script.stdin is not None and script.stdout is not None
    script.stdin.write(SCRIPT.format(checkpoint=str(checkpoint), rest=rest))
    script.stdin.close()
    lines = [script.stdout.readline().strip() for _ in range(3)]
    pids = [int(pid) for pid in lines[1].split()]
    assert lines[0] == "began" and lines[2] == "6" and len(pids) == 2
    if how == "killed":
        script.kill()
    assert script.wait(20) == (0 if how == "ends" else -signal.SIGKILL)
    assert gone(pids)
    script.stdout.close()


def test_nobody_holds_it(checkpoint: Path) -> None:
    """A model that is dropped takes its workers along; one that is moved becomes the whole model."""
    model = GPT2LMHeadModel.from_config_with_parallel(deployed.CONFIG, deploy=True, verbose="simple")
    pids = model._engine.pids
    plain = model.cpu()
    assert gone(pids) and type(plain) is GPT2LMHeadModel and plain.lm_head.weight.shape == (101, 48)
    model.restart()
    pids = model._engine.pids
    del model
    gc.collect()
    assert gone(pids)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"deploy": True, "deployment": False}, "deploy=True and deployment=False are the same argument"),
        ({"deploy_backend": "smoke signals"}, "deploy_backend='smoke signals'"),
        ({"max_batch_size": 0}, "max_batch_size must be an integer of at least 1, got 0"),
        ({"batch_wait_ms": -1}, "batch_wait_ms must be a number of at least 0, got -1"),
        ({"verbose": "very"}, "verbose must be None, 'simple' or 'detail', got 'very'"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 is more than num_attention_heads=4"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1, got 0"),
    ],
)
def test_arguments_are_checked_before_anything_starts(kwargs: dict[str, Any], text: str) -> None:
    before = workers()
    with pytest.raises(ValueError, match=text):
        GPT2LMHeadModel.from_config_with_parallel(deployed.CONFIG, **{"deploy": True, **kwargs})
    assert workers() <= before


def test_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="start the script with python, without torchrun"):
        GPT2LMHeadModel.from_config_with_parallel(deployed.CONFIG, deploy=True)
