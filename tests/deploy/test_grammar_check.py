"""Hostile grammars: bounded before a native parser sees them, and compiled in a process that may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from oslo_models.deploy import grammar_check
from oslo_models.deploy.grammar import Grammar, Vocabulary

from support.corpora import tokenizer


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
