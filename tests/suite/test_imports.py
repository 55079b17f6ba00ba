"""No import cycles in the library and the benchmarks; test modules import neither each other nor the benchmarks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx
import pytest

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


@pytest.mark.parametrize("package", ["oslo_models", "benchmarks"])
def test_package_has_no_import_cycles(package: str) -> None:
    """Imports inside functions and under TYPE_CHECKING count; `make imports` checks the order of packages."""
    modules = grimp.build_graph(package, cache_dir=None)
    imported = networkx.DiGraph(
        (module, other) for module in modules.modules for other in modules.find_modules_directly_imported_by(module)
    )
    assert imported.number_of_edges() > 20
    assert not [cycle for cycle in networkx.strongly_connected_components(imported) if len(cycle) > 1]
