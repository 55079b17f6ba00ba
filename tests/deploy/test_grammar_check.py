"""Hostile grammars: bounded before a native parser sees them, and compiled in a process that may die."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config

pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import grammar_check
from oslo_models.deploy.grammar import Grammar, Vocabulary
from oslo_models.server.app import application

from support.corpora import tokenizer
from support.http_server import connect, listening, post_bytes, read_answer


def chain(rules: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(rules)) + f'r{rules}: "a"'


def references(count: int) -> dict[str, Any]:
    chained = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chained, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(count)}}


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    tok = tokenizer()
    made = Vocabulary.of(tok, len(tok), [0])
    yield made
    made.checker.close()


def pid(vocabulary: Vocabulary) -> int:
    Grammar.compiled("regex", "a+", vocabulary)
    assert vocabulary.checker._process is not None
    return vocabulary.checker._process.pid


TOO_LARGE: list[tuple[str, Any, str]] = [
    ("grammar", chain(4000), "4002 rules"),
    ("grammar", "start: " + "|".join(['"a"'] * 5000), "4999 parts"),
    ("grammar", "start: " + "(" * 100 + '"a"' + ")" * 100, "100 levels"),
    ("grammar", "start: " + '"a" ' * 20_000, "80007 bytes"),
    ("regex", "(" * 100 + "a" + ")" * 100, "100 levels"),
    ("regex", "a" * 70_000, "70000 bytes"),
    ("json", nested(5000), "65 levels"),
    ("json", optional(8000), "8002 parts"),
    ("json", {"const": "é" * 40_000}, "80013 bytes"),
    ("choice", ["a"] * 5000, "5000 parts"),
    ("choice", ["a" * 70_000], "70000 bytes"),
]


@pytest.mark.parametrize(("kind", "source", "text"), TOO_LARGE, ids=[f"{kind} {text}" for kind, _, text in TOO_LARGE])
def test_large_grammars_are_refused_before_their_parser(
    kind: str, source: Any, text: str, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check.GrammarChecker, "_ask", None)
    began = time.monotonic()
    with pytest.raises(ValueError, match=text):
        Grammar.compiled(kind, source, vocabulary)
    assert time.monotonic() - began < 1


def test_a_parser_that_overflows_its_stack_ends_a_process_of_its_own(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pid(vocabulary)
    for limit in ("MOST_BYTES", "MOST_RULES", "MOST_PARTS", "MOST_DEPTH"):
        monkeypatch.setattr(grammar_check, limit, 1 << 30)
    for kind, source in (("grammar", chain(20_000)), ("json", references(5000))):
        with pytest.raises(ValueError, match="too complex: its parser failed"):
            Grammar.compiled(kind, source, vocabulary)
    assert pid(vocabulary) != before, "another process has taken its place"


def test_a_slow_grammar_is_refused_and_its_process_ended(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MOST_PARTS", 1 << 30)
    monkeypatch.setattr(grammar_check, "MOST_BYTES", 1 << 30)
    with pytest.raises(ValueError, match="structured output"):
        Grammar.compiled("json", optional(8000), vocabulary)
    before = pid(vocabulary)
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr(grammar_check, "WAIT_SECONDS", 0.2)
    with pytest.raises(ValueError, match="took too long"):
        Grammar.compiled("regex", "a+", vocabulary)
    monkeypatch.undo()
    assert pid(vocabulary) != before


def test_a_process_that_others_kill_is_started_again(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar is not at fault when the kernel ends its process for want of memory."""
    asked, ask = list[Any](), vocabulary.checker._ask
    before = pid(vocabulary)

    def killed(message: Any, seconds: float) -> Any:
        asked.append(message)
        if len(asked) == 1:
            os.kill(before, signal.SIGKILL)
        return ask(message, seconds)

    monkeypatch.setattr(vocabulary.checker, "_ask", killed)
    assert Grammar.compiled("regex", "ab", vocabulary).with_vocabulary(vocabulary).processor() is not None
    assert asked[0] == asked[-1] and len(asked) == 3, "the grammar, the vocabulary of another process, the grammar"


def test_a_process_that_is_ended_stays_ended(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last model may be closed while a thread waits for an answer."""
    ask, asked = vocabulary.checker._ask, list[Any]()
    pid(vocabulary)

    def ended(message: Any, seconds: float) -> Any:
        asked.append(message)
        vocabulary.checker.end()
        return ask(message, seconds)

    monkeypatch.setattr(vocabulary.checker, "_ask", ended)
    with pytest.raises(ValueError, match="its parser failed with signal 9"):
        Grammar.compiled("regex", "ab", vocabulary)
    assert vocabulary.checker._process is None and len(asked) == 1


def test_grammars_of_ordinary_size_are_compiled(vocabulary: Vocabulary) -> None:
    for kind, source in (
        ("json", nested(20)),
        ("json", optional(300)),
        ("grammar", chain(500)),
        ("regex", r"\d{4}-\d\d-\d\d"),
        ("choice", [f"option {i}" for i in range(500)]),
    ):
        grammar = Grammar.compiled(kind, source, vocabulary)
        assert grammar.with_vocabulary(vocabulary).processor() is not None


@pytest.mark.parametrize(
    ("kind", "source"), [("regex", "(secret"), ("grammar", "secret secret"), ("json", {"type": "x"})]
)
def test_errors_of_parsers_are_one_line_that_does_not_quote_the_client(
    kind: str, source: Any, vocabulary: Vocabulary
) -> None:
    with pytest.raises(ValueError, match=f"the {kind} for structured output cannot be used") as caught:
        Grammar.compiled(kind, source, vocabulary)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(("pattern", "least", "length"), [("a|b", 5, 1), ("a*", 3, 3)])
def test_a_grammar_that_has_ended_ends_the_text_before_its_least_number_of_tokens(
    pattern: str, least: int, length: int, vocabulary: Vocabulary
) -> None:
    grammar = replace(Grammar.compiled("regex", pattern, vocabulary), least=least).with_vocabulary(vocabulary)
    processor, ids_BL = grammar.processor(), torch.tensor([[5, 6]])
    scores_BV = torch.zeros(1, vocabulary.size)
    scores_BV[0, 0] = 1.0  # the end, wherever it is allowed
    while (token := int(processor(ids_BL, scores_BV).argmax())) != 0:
        ids_BL = torch.cat([ids_BL, torch.tensor([[token]])], 1)
    assert ids_BL.shape[1] - 2 >= length and (length == 3 or ids_BL.shape[1] - 2 == 1)


# Beside streams of other clients --------------------------------------------------------------------------------------

STANDSTILL = 1.0
"""Seconds that the stream of another client may stand still."""
SHRINKING = (8000, 4000, 2000, 1500, 1000, 600, 300, 100)


def just_allowed(kind: str, make: Any, vocabulary: Vocabulary) -> Any:
    """Return the largest of these grammars that is not refused."""
    for size in SHRINKING:
        try:
            Grammar.compiled(kind, make(size), vocabulary)
        except ValueError:
            continue
        return make(size)
    raise AssertionError(f"no {kind} is allowed")


def bounded(count: int) -> dict[str, Any]:
    """A schema with costly numbers, each within a range of its own."""
    fields = {f"k{i}": {"type": "integer", "minimum": i * 10**6, "maximum": i * 10**6 + 7654321} for i in range(count)}
    return {"type": "object", "properties": fields, "required": list(fields)}


def cpu_seconds(pids: list[int]) -> float:
    """CPU time of this process and of these."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return time.process_time() + sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def longest_standstill(url: str, pids: list[int], bodies: list[bytes]) -> float:
    """Return the longest gap in the streams of a client, until others have got two answers to each of ``bodies``.

    A gap counts as CPU time if this is less than its wall time, because other processes delay the stream too.
    """
    stream = {"prompt": "def", "max_tokens": 300, "temperature": 0, "stream": True, "logit_bias": {"5": 100}}
    gaps, statuses = list[float](), set[int]()

    def ask(body: bytes) -> None:
        for _ in range(2):
            with connect(url, post_bytes("/v1/completions", body)) as client:
                statuses.add(read_answer(client)[0])

    with ThreadPoolExecutor(len(bodies)) as threads:
        asking = [threads.submit(ask, body) for body in bodies]
        while not all(each.done() for each in asking):
            with connect(url, post_bytes("/v1/completions", json.dumps(stream).encode())) as client:
                data, last = b"", (time.monotonic(), cpu_seconds(pids))
                while b"[DONE]" not in data:
                    more = client.recv(1 << 16)
                    assert more, "the stream ended early"
                    data = data[-16:] + more
                    now = time.monotonic(), cpu_seconds(pids)
                    gaps.append(min(after - before for after, before in zip(now, last, strict=True)))
                    last = now
        for each in asking:
            each.result()
    assert len(gaps) > 30 and statuses <= {200, 400}, (len(gaps), statuses)
    return max(gaps)


def test_streams_of_others_go_on_beside_the_most_costly_grammars(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """The server admits these grammars: they are just below the bounds for their size and their first mask."""
    schemas = [just_allowed("json", make, vocabulary) for make in (optional, bounded)]
    asked = [{"structured_outputs": {"json": each}} for each in schemas]
    options = [f"option {i}" for i in range(4000)]
    asked += [{"structured_outputs": {"choice": just_allowed("choice", lambda n: options[:n], vocabulary)}}]
    bodies = [json.dumps({"prompt": "x", "max_tokens": 6, "temperature": 0, **each}).encode() for each in asked]
    words = tokenizer()
    sizes = {"n_positions": 1024, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": len(words)}
    torch.manual_seed(0)
    made = GPT2LMHeadModel.from_config_with_parallel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    made.save_pretrained_with_parallel(tmp_path)
    found = list[float]()
    with GPT2LMHeadModel.from_pretrained_with_parallel(tmp_path, deploy=True) as model:  # noqa: SIM117
        with listening(application(model, words)) as url:
            for _ in range(3):  # the machine may be busy
                found.append(longest_standstill(url, model._engine.pids, bodies))
                if found[-1] < STANDSTILL:
                    return
    raise AssertionError(f"a stream stood still for {min(found):.2f} s")
