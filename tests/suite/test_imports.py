"""Test modules import neither each other nor the benchmarks: what several use is in tests/support."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support import ROOT

FILES = sorted((ROOT / "tests").rglob("test_*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def unwanted(path: Path) -> set[str]:
    """The modules that a test module imports and should not."""
    roots = {name.partition(".")[0] for name in imports(path)}
    others = {root for root in roots if root == "conftest" or root.startswith("test_")}
    return others if path.parent.name == "benchmarks" else others | roots & {"benchmarks"}


def test_test_modules_import_neither_each_other_nor_the_benchmarks() -> None:
    assert FILES and not {path.name: found for path in FILES if (found := unwanted(path))}


def test_names_of_test_files_are_unique() -> None:
    """pytest and the workers of the pool import them by these names."""
    assert len({path.name for path in FILES}) == len(FILES)
