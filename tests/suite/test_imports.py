"""No import cycles in the library and the benchmarks; test modules import neither each other nor the benchmarks."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

FILES = sorted((ROOT / "tests").rglob("test_*.py"))
REQUIRED = {"huggingface_hub", "hypothesis", "numpy", "pytest", "safetensors", "torch", "tqdm", "transformers"}
OWN = {"benchmarks", "oslo_kernels", "oslo_models", "support"}
"""Packages that test modules may import without a check, besides Python's own modules."""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        yield from imports_of(node)


def imports_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield node.module or ""


def unwanted(path: Path) -> set[str]:
    """Return the forbidden imports of a test module."""
    roots = {name.partition(".")[0] for name in imports(path)}
    others = {root for root in roots if root == "conftest" or root.startswith("test_")}
    return others if path.parent.name == "benchmarks" else others | roots & {"benchmarks"}


def test_test_modules_import_neither_each_other_nor_the_benchmarks() -> None:
    assert FILES and not {path.name: found for path in FILES if (found := unwanted(path))}


def optional_imports(path: Path) -> set[str]:
    """Return optional packages that a test module imports at the top without ``importorskip``."""
    found, asked = set[str](), set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith("pytest.importorskip("):
            asked.add(ast.literal_eval(node.value.args[0]))  # type: ignore[attr-defined]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {name.partition(".")[0] for name in imports_of(node)} - asked
    return found - REQUIRED - OWN - sys.stdlib_module_names


def test_test_modules_can_be_collected_without_optional_packages() -> None:
    """A machine with a GPU may lack them, and one failed import ends the whole run."""
    assert not {path.name: found for path in FILES if (found := optional_imports(path))}


def test_names_of_test_files_are_unique() -> None:
    """pytest and the workers of the pool import them by these names."""
    assert len({path.name for path in FILES}) == len(FILES)


@pytest.mark.parametrize("package", ["oslo_models", "benchmarks"])
def test_package_has_no_import_cycles(package: str) -> None:
    """Imports inside functions and under TYPE_CHECKING count; `make imports` checks the order of packages."""
    grimp, networkx = pytest.importorskip("grimp"), pytest.importorskip("networkx")
    modules = grimp.build_graph(package, cache_dir=None)
    imported = networkx.DiGraph(
        (module, other) for module in modules.modules for other in modules.find_modules_directly_imported_by(module)
    )
    assert imported.number_of_edges() > 20
    assert not [cycle for cycle in networkx.strongly_connected_components(imported) if len(cycle) > 1]
