"""Every mutant finds the piece of source that it replaces.

A mutant without its piece fails only when it runs, and most run in `make test-zoo` only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from support import ROOT
from support.mutants import Edit, load_module

TESTS = ROOT / "tests"
FILES = sorted(
    str(path.relative_to(TESTS))
    for path in TESTS.glob("*/test_*.py")
    if "support.mutants import" in (text := path.read_text()) and "Edit(" in text and path != Path(__file__)
)


def written_edits(module: ModuleType) -> Iterator[Edit]:
    """Yield the edits of a file whose arguments are constants of the file."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Edit":
            try:
                yield eval(compile(ast.Expression(node), str(module.__file__), "eval"), vars(module))
            except NameError:  # rows of a table, which are parameters of a test
                continue


def edits_in(value: Any) -> Iterator[Edit]:
    if isinstance(value, Edit):
        yield value
    elif isinstance(value, Mapping):
        yield from edits_in(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from edits_in(each)


def given_edits(module: ModuleType) -> Iterator[Edit]:
    """Yield the edits that are parameters of the tests of a file."""
    for function in vars(module).values():
        if isinstance(function, FunctionType):
            for mark in getattr(function, "pytestmark", ()):
                yield from edits_in(mark.args)


@pytest.mark.parametrize("file", FILES)
def test_every_mutant_finds_its_piece_once(file: str) -> None:
    module, lines = load_module(file), []
    found = {*written_edits(module), *given_edits(module)}
    for edit in sorted(found, key=lambda edit: (edit.function, edit.old, edit.new)):
        try:
            edit.source()
        except LookupError as error:
            lines.append(str(error))
    assert found and not lines, "\n".join(lines)


def test_files_with_mutants_are_found() -> None:
    assert {"suite/test_mutants.py", "suite/test_expert_mutants.py", "deploy/test_batch_mutants.py"} <= {*FILES}
