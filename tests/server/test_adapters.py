"""``oslo-models serve --adapter``: each adapter's answers equal the results of plain ``peft``."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM

pytest.importorskip("uvicorn")
pytest.importorskip("peft", reason="peft is not installed")

import peft

from oslo_models.cli.main import main
from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.errors import EngineError
from oslo_models.server.adapter_turns import AdapterTurns

from support.corpora import tokenizer
from support.http_server import connect, post_bytes, read_answer
from support.served import PATH, Running, get, serving
from support.waiting import LIMIT, wait_until

NAMES = ("first", "second/v1.0")
PROMPTS = ("def f", "import os", "a = 1", "class")


def write_adapter(model: Any, folder: Path, seed: int, targets: list[str], **options: Any) -> Any:
    """Save an adapter with random weights in a folder; return the single-process model with the adapter."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=3, lora_alpha=40, target_modules=targets, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """A folder with a model and two adapters, and their single-process models by name."""
    folder, seed = tmp_path_factory.mktemp("adapters"), random.SystemRandom().randrange(2**31)
    tokenizer().save_pretrained(folder / "base")
    torch.manual_seed(seed)
    sizes = {"n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": len(tokenizer())}
    base: Any = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.3)).eval()
    base.save_pretrained(folder / "base")
    base = base.double()
    first = write_adapter(base, folder / "first", seed + 1, ["c_attn", "c_fc"])
    second = write_adapter(base, folder / "second", seed + 2, ["c_proj"])
    yield folder, {str(folder / "base"): base, NAMES[0]: first.eval(), NAMES[1]: second.eval()}


def expected(model: Any, prompt: str, most: int) -> list[str]:
    """Return the tokens that one process generates."""
    ids_BL = torch.tensor([tokenizer()(prompt)["input_ids"]])
    options = {"attention_mask": torch.ones_like(ids_BL), "pad_token_id": 0, "do_sample": False}
    out_BL = model.generate(input_ids=ids_BL, max_new_tokens=most, **options)
    new = [token for token in out_BL[0, ids_BL.shape[1] :].tolist() if token != 0]
    return [tokenizer().decode([token]) for token in new]


def texts(body: Any) -> list[str]:
    """Return the tokens of an answer as `expected` does: the server names the bytes of incomplete characters."""
    tokens = body["choices"][0]["logprobs"]["tokens"]
    return ["\ufffd" if token.startswith("bytes:") else token for token in tokens]


def ask(url: str, **body: Any) -> tuple[int, Any]:
    data = json.dumps({"temperature": 0, "logprobs": 0, **body}).encode()
    with connect(url, post_bytes(PATH, data)) as connected:
        status, _, answer = read_answer(connected)
    return status, json.loads(answer)


def check_answers(url: str, models: Mapping[str, Any]) -> None:
    """Send concurrent requests of several clients to all models in turn, with different lengths."""
    asked = [(name, prompt, 5 + 9 * (i % 3)) for i, prompt in enumerate(PROMPTS) for name in models]

    def answer(request: tuple[str, str, int]) -> tuple[str, list[str]]:
        name, prompt, most = request
        status, body = ask(url, model=name, prompt=prompt, max_tokens=most)
        assert status == 200, body
        return body["model"], texts(body)

    with ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(answer, asked))
    for (name, prompt, most), (model, tokens) in zip(asked, answers, strict=True):
        assert model == name and tokens == expected(models[name], prompt, most), (name, prompt)


def options_for(folder: Path) -> list[str]:
    adapters = [option for name in NAMES for option in ("--adapter", f"{name}={folder / name.split('/')[0]}")]
    return ["--tensor-parallel-size", "2", "--dtype", "float64", *adapters]


def test_requests_are_computed_with_the_adapter_they_name(models: tuple[Path, Mapping[str, Any]], warm: None) -> None:
    folder, by_name = models
    base = str(folder / "base")
    assert len({tuple(expected(model, PROMPTS[0], 8)) for model in by_name.values()}) == 3
    with serving(folder / "base", *options_for(folder)) as running:
        url = running.says(" at http").split(" at ")[1].strip()
        check_answers(url, by_name)
        listed = json.loads(get(f"{url}/v1/models", host="localhost")[2])["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [
            (base, None),
            *((name, base) for name in NAMES),
        ]
        assert json.loads(get(f"{url}/v1/models/{NAMES[1]}", host="localhost")[2])["parent"] == base
        status, body = ask(url, model="third", prompt="def", max_tokens=2)
        assert status == 404 and all(repr(name) in body["error"]["message"] for name in by_name), body
        status, body = ask(url, prompt=PROMPTS[0], max_tokens=8)
        assert texts(body) == expected(by_name[base], PROMPTS[0], 8)


@pytest.mark.zoo
def test_adapters_are_there_again_before_new_workers_answer(models: tuple[Path, Mapping[str, Any]], warm: None) -> None:
    folder, by_name = models
    with serving(folder / "base", *options_for(folder)) as running:
        check_restart(running, running.says(" at http").split(" at ")[1].strip(), by_name)


def check_restart(running: Running, url: str, models: Mapping[str, Any]) -> None:
    """During a restart of the workers, each request gets the answer of its adapter or status 503."""
    right = {name: expected(model, PROMPTS[0], 6) for name, model in models.items()}
    seen: set[int] = set()
    ended = threading.Event()

    def client(name: str) -> None:
        while not ended.is_set():
            status, body = ask(url, model=name, prompt=PROMPTS[0], max_tokens=6)
            seen.add(status)
            assert status == 503 or texts(body) == right[name], (name, body)

    with ThreadPoolExecutor(len(models)) as clients:
        running_clients = [clients.submit(client, name) for name in models]
        try:
            os.kill(running.workers[0], signal.SIGKILL)
            running.says("were started again")
        finally:
            ended.set()
        for each in running_clients:
            each.result()
    assert 503 in seen
    check_answers(url, models)


# Adapters that cannot be served ---------------------------------------------------------------------------------------


def refusals(folder: Path, base: Any) -> dict[str, tuple[list[str], str]]:
    """Values of ``--adapter``, and the expected messages."""
    other = GPTNeoForCausalLM(
        GPTNeoConfig(
            hidden_size=16, num_layers=2, num_heads=2, vocab_size=50, attention_types=[[["global", "local"], 1]]
        )
    )
    deeper = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=base.config.vocab_size))
    wider = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=base.config.vocab_size))
    write_adapter(other, folder / "other", 0, ["q_proj"])
    write_adapter(deeper, folder / "deeper", 0, ["c_attn"])
    write_adapter(wider, folder / "wider", 0, ["c_attn"])
    write_adapter(base, folder / "bias", 0, ["c_attn"], bias="all")
    write_adapter(base, folder / "saves", 0, ["c_attn"], modules_to_save=["lm_head"])
    peft.get_peft_model(
        copy.deepcopy(base), peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[])
    ).save_pretrained(folder / "ia3")
    fits = f"{folder / 'first'}"
    return {
        "no path": (["first"], "pass it as NAME=PATH"),
        "missing": ([f"x={folder / 'none'}"], "not a directory with the adapter_config.json"),
        "twice": ([f"x={fits}", f"x={fits}"], "the name 'x' is taken"),
        "as the model": ([f"{folder / 'base'}={fits}"], "is taken"),
        "architecture": ([f"x={folder / 'other'}"], "does not fit this gpt2 model: Target modules"),
        "deeper": ([f"x={folder / 'deeper'}"], "h.2.attn.c_attn.lora_A"),
        "wider": ([f"x={folder / 'wider'}"], "size mismatch"),
        "bias": ([f"x={folder / 'bias'}"], "which would stay in the model"),
        "modules_to_save": ([f"x={folder / 'saves'}"], "which would stay in the model"),
        "kind": ([f"x={folder / 'ia3'}"], "it has the type IA3"),
    }


def test_adapters_that_do_not_fit_are_refused_before_the_server_listens(
    models: tuple[Path, Mapping[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, by_name = models
    for name in ("base", "first"):
        (tmp_path / name).symlink_to(folder / name)
    cases = refusals(tmp_path, by_name[str(folder / "base")])
    for what, (values, message) in cases.items():
        options = [option for value in values for option in ("--adapter", value)]
        assert main(["serve", str(tmp_path / "base"), "--port", "0", *options]) == 2, what
        said = capsys.readouterr().err
        assert message in said and "listening" not in said, (what, said)
    assert main(["serve", "a", "b", "--adapter", f"x={folder / 'first'}"]) == 2
    assert "one model, not of 2" in capsys.readouterr().err


# Turns ----------------------------------------------------------------------------------------------------------------


class Switched:
    """Stand-in for a deployed model: records its adapter switches."""

    def __init__(self) -> None:
        self.active: str | None = "nobody knows"
        self.switches, self.dead = list[str | None](), False

    def set_adapter(self, name: str) -> None:
        if self.dead:
            raise EngineError("dead")
        self._name = name

    def enable_adapters(self) -> None:
        self.active = self._name
        self.switches.append(self.active)

    def disable_adapters(self) -> None:
        self.active = None
        self.switches.append(None)


class Calls:
    """Calls in threads; each call lasts until the test ends it."""

    def __init__(self) -> None:
        self.model = Switched()
        self.turns = AdapterTurns(self.model)
        self.began = list[str]()

    def begin(self, adapter: str | None, name: str) -> tuple[Callable[[], None], Cancellation]:
        """Start a call, and wait until it runs or waits; return a function that ends it, and its cancellation."""
        end, cancellation, left = threading.Event(), Cancellation(), threading.Event()

        def call() -> None:
            with suppress(CallCancelled, EngineError), self.turns.turn_of(adapter, cancellation):
                assert self.model.active == adapter
                self.began.append(name)
                end.wait(LIMIT)
                assert self.model.active == adapter
            left.set()

        before = len(self.turns._waiting)
        threading.Thread(target=call, daemon=True).start()
        wait_until(lambda: name in self.began or len(self.turns._waiting) > before or left.is_set())

        def finish() -> None:
            end.set()
            assert left.wait(LIMIT)

        return finish, cancellation


def test_adapters_take_turns_in_the_order_of_arrival() -> None:
    calls = Calls()
    end_a, _ = calls.begin("a", "a1")
    end_a2, _ = calls.begin("a", "a2")
    assert calls.began == ["a1", "a2"] and calls.model.switches == ["a"]
    ends = [calls.begin(adapter, name)[0] for adapter, name in (("b", "b1"), ("a", "a3"), (None, "n1"), ("b", "b2"))]
    end_a()
    time.sleep(0.05)
    assert calls.began == ["a1", "a2"]  # one of the first turn still runs; the third of its adapter came after another
    end_a2()
    wait_until(lambda: len(calls.began) == 4)
    assert set(calls.began[2:]) == {"b1", "b2"}
    ends[0](), ends[3]()
    wait_until(lambda: len(calls.began) == 5)
    ends[1]()
    wait_until(lambda: len(calls.began) == 6)
    ends[2]()
    assert calls.began[4:] == ["a3", "n1"] and calls.model.switches == ["a", "b", "a", None]


def test_cancelled_calls_leave_the_queue_and_failed_switches_are_tried_again() -> None:
    calls = Calls()
    end, _ = calls.begin(None, "n1")
    _, cancellation = calls.begin("b", "b1")
    end_other, _ = calls.begin(None, "n2")
    assert calls.began == ["n1"]
    cancellation.cancel()
    wait_until(lambda: calls.began == ["n1", "n2"])
    end(), end_other()
    calls.model.dead = True
    calls.begin("b", "b2")
    assert calls.began == ["n1", "n2"] and not calls.turns._running
    calls.model.dead = False
    calls.begin("b", "b3")[0]()
    assert calls.began == ["n1", "n2", "b3"] and calls.model.switches == [None, "b"]
