"""Everything that overrides a private method, replaces a forward or imports a private name is listed as a contract."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import textwrap
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

import oslo_models
from oslo_models.contracts.listing import CONTRACTS, LAYERS, PACKAGES

ROOT = Path(oslo_models.__file__).parent
LISTED = {contract.original for contract in CONTRACTS}
FUSED = {name for contract in LAYERS.values() for name in contract.replaced_by}
OF_DECORATED_CLASSES = {"experts.FusedExperts", "experts.FusedParallelExperts"}
"""Experts of transformers have no common class. The decorator that they share is among the contracts."""


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


# Private names --------------------------------------------------------------------------------------------------------


def private_names(source: str) -> set[str]:
    """Return private modules and attributes of other packages that a file imports or reads."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                imported[each.asname or each.name.partition(".")[0]] = (
                    each.name if each.asname else each.name.partition(".")[0]
                )
                found.add(each.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                imported[each.asname or each.name] = f"{node.module}.{each.name}"
                found.add(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.insert(0, inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in imported:
            found.add(".".join((imported[inner.id], *parts)))
    return {name for name in found if name.partition(".")[0] in PACKAGES and is_private(name)}


def unlisted_names(source: str) -> set[str]:
    """Return the `private_names` without a contract. A contract of a module or class covers its attributes."""
    return {name for name in private_names(source) if not any(contains(*pair) for pair in product([name], LISTED))}


def contains(name: str, listed: str) -> bool:
    """Whether one of two dotted names equals or contains the other."""
    return f"{name}.".startswith(f"{listed}.") or f"{listed}.".startswith(f"{name}.")


def test_private_names_are_listed() -> None:
    found = {str(file.relative_to(ROOT)): unlisted_names(file.read_text()) for file in ROOT.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}


def test_unlisted_private_names_are_found() -> None:
    source = """
        import torch._dynamo
        from transformers.cache_utils import _static_cache_update
        from torch.nn.modules.conv import _ConvNd
        from transformers import generation
        generation.utils.GenerationMixin._beam_search
    """
    assert unlisted_names(textwrap.dedent(source)) == {
        "torch._dynamo",
        "transformers.cache_utils._static_cache_update",
        "transformers.generation.utils.GenerationMixin._beam_search",
    }


# Overrides ------------------------------------------------------------------------------------------------------------


def modules() -> list[Any]:
    """Return the modules of the package with installed requirements."""
    found = []
    for each in pkgutil.walk_packages(oslo_models.__path__, "oslo_models."):
        if not each.name.endswith("__main__"):
            try:
                found.append(importlib.import_module(each.name))
            except ImportError as error:
                missing = {"ray", "trl", "peft", "deepspeed", "lightning", "torchao", "bitsandbytes"}
                if str(error.name).partition(".")[0] not in missing:
                    raise
    return found


def classes_of(module: Any) -> list[tuple[type, ast.ClassDef]]:
    """Return the top-level classes of a module with their source."""
    nodes = ast.parse(Path(module.__file__).read_text()).body
    return [(vars(module)[node.name], node) for node in nodes if isinstance(node, ast.ClassDef)]


def methods_of(source: ast.ClassDef) -> Iterator[str]:
    """Yield the private methods and forwards that a class defines."""
    for node in source.body:
        name = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ""
        if name == "forward" or is_private(name):
            yield name


def overridden(cls: type, source: ast.ClassDef, classes: Iterable[type]) -> Iterator[str]:
    """Yield the methods of other packages that a class overrides, itself or through a subclass."""
    families = [each.__mro__[each.__mro__.index(cls) + 1 :] for each in classes if cls in each.__mro__]
    for name in methods_of(source):
        for after in families:
            owner = next((each for each in after if name in vars(each) and is_foreign(each)), None)
            if owner is not None and not (name == "forward" and owner.__name__ in ("Module", "_SingleLevelFunction")):
                yield f"{owner.__module__}.{owner.__qualname__}.{name}"
                break


def is_foreign(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in PACKAGES


def test_overrides_are_listed() -> None:
    found = [pair for module in modules() for pair in classes_of(module)]
    classes = [cls for cls, _ in found]
    missing = {original for cls, source in found for original in overridden(cls, source, classes)} - LISTED
    assert missing == set()


def test_unlisted_overrides_are_found() -> None:
    source = "class Mutant:\n    def _beam_search(self, *args):\n        return super()._beam_search(*args)"
    names: dict[str, Any] = {}
    exec(source, names)
    joined = type("Joined", (names["Mutant"], oslo_models.GPT2LMHeadModel), {})
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    expected = "transformers.generation.utils.GenerationMixin._beam_search"
    assert [*overridden(names["Mutant"], node, [joined])] == [expected]
    assert expected not in LISTED


def test_fused_classes_are_listed() -> None:
    """Each class of `fusion` that replaces a layer has a contract."""
    own = [module for module in modules() if module.__name__.startswith("oslo_models.fusion.")]
    found = set()
    for module in own:
        for cls, source in classes_of(module):
            computes = any(each in vars(cls) for each in ("forward", "attend", "compute", "config"))
            if computes and issubclass(cls, nn.Module) and not LISTED.intersection(overridden(cls, source, [cls])):
                found.add(f"{module.__name__.rpartition('.')[2]}.{cls.__name__}")
    assert found - FUSED == OF_DECORATED_CLASSES


def test_used_by_exists() -> None:
    for contract in CONTRACTS:
        for user in contract.used_by:
            file = ROOT.joinpath(*user.split("."))
            known = (file.with_suffix(".py"), file, file.parent.with_suffix(".py"))
            assert any(each.exists() for each in known), user
    for name in FUSED:
        module, cls = name.split(".")
        assert hasattr(importlib.import_module(f"oslo_models.fusion.{module}"), cls), name
