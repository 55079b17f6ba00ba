"""Finds functions in the source of a package: installed, unpacked or in a wheel. Imports nothing."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oslo_models.contracts.fingerprint import Function

Folder = Path | zipfile.Path


class Sources:
    """The source of one release of a package.

    Args:
        folder: contains the package's own folder.
    """

    def __init__(self, package: str, folder: Folder) -> None:
        self.package, self._folder = package, folder
        self._modules: dict[str, dict[str, ast.stmt] | None] = {}

    def functions(self, name: str) -> list[Function]:
        """Return the function or method with this dotted name, and its direct and indirect callees in the same file.

        Returns:
            An empty list if the release has no such function.
        """
        module, found = self._find(name)
        if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return []
        return [found, *called(found, self._definitions(module) or {})]

    def has(self, name: str) -> bool:
        """Return whether the release has a module with this dotted name, or defines or imports the name."""
        return self._definitions(name) is not None or self._find(name)[1] is not None

    def _find(self, name: str) -> tuple[str, ast.stmt | None]:
        parts = name.split(".")
        for stop in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:stop])
            definitions = self._definitions(module)
            if definitions is not None:
                return module, _member(definitions, parts[stop:])
        return name, None

    def _definitions(self, module: str) -> dict[str, ast.stmt] | None:
        """Return the statements of a module that bind names, by name; ``None`` if the module does not exist."""
        if module not in self._modules:
            path = "/".join(module.split("."))
            files = (self._folder / f"{path}.py", self._folder / f"{path}/__init__.py")
            file = next((file for file in files if file.is_file()), None)
            self._modules[module] = None if file is None else dict(_bound(ast.parse(file.read_text("utf-8")).body))
        return self._modules[module]


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name, statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from ((each.asname or each.name.partition(".")[0], statement) for each in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((each.id, statement) for each in targets if isinstance(each, ast.Name))
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _bound(handler.body)


def _member(definitions: dict[str, ast.stmt], path: list[str]) -> ast.stmt | None:
    found = definitions.get(path[0])
    if len(path) == 1 or not isinstance(found, ast.ClassDef):
        return found if len(path) == 1 else None
    own = dict(_bound(found.body))
    if path[1] in own:
        return _member(own, path[1:])
    for base in found.bases:  # only base classes of the same file
        if isinstance(base, ast.Name) and base.id != path[0] and base.id in definitions:
            inherited = _member(definitions, [base.id, *path[1:]])
            if inherited is not None:
                return inherited
    return None


def called(function: Function, definitions: dict[str, Any], seen: frozenset[str] = frozenset()) -> list[Function]:
    """Return the functions in ``definitions`` that a function calls, directly or indirectly, each once."""
    made: dict[str, Function] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id not in seen | made.keys():
            found = definitions.get(node.id)
            if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) and found is not function:
                made[node.id] = found
    for name, each in list(made.items()):
        for inner in called(each, definitions, seen | made.keys() | {name}):
            made.setdefault(inner.name, inner)
    return list(made.values())


# Functions of this process --------------------------------------------------------------------------------------------


def parsed(function: Callable[..., Any]) -> Function | None:
    """Return the syntax tree of a function of this process; ``None`` if its source cannot be read."""
    unwrapped: Any = inspect.unwrap(function)
    if not inspect.isfunction(unwrapped):
        return None
    code = unwrapped.__code__  # inspect.getsource would look for the module of the function among all modules
    lines = linecache.getlines(code.co_filename, unwrapped.__globals__)[code.co_firstlineno - 1 :]
    try:
        body = ast.parse(textwrap.dedent("".join(inspect.getblock(lines)))).body
    except SyntaxError:
        return None
    return body[0] if body and isinstance(body[0], (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def globals_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the current functions among the globals of its file that a function uses, directly or indirectly."""
    found: dict[str, Any] = {}
    todo = [inspect.unwrap(function)]
    while todo:
        owner: Any = todo.pop()
        for name in owner.__code__.co_names if inspect.isfunction(owner) else ():
            value = owner.__globals__.get(name)
            if name not in found and inspect.isfunction(value):
                found[name] = value
                if value.__module__ == owner.__module__:
                    todo.append(value)
    return tuple(found.values())


def functions_of(function: Callable[..., Any]) -> list[Function]:
    """Return the same as `Sources.functions`, for a function of this process."""
    unwrapped: Any = inspect.unwrap(function)
    tree = parsed(unwrapped)
    if tree is None:
        return []
    found, todo, seen = [tree], [(tree, unwrapped)], {unwrapped.__name__}
    while todo:
        tree, owner = todo.pop()
        for name in dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)):
            value = owner.__globals__.get(name)
            if name in seen or not inspect.isfunction(value) or value.__module__ != owner.__module__:
                continue
            seen.add(name)
            inner = parsed(value)
            if inner is None:
                return []
            found.append(inner)
            todo.append((inner, inspect.unwrap(value)))
    return found


# Releases -------------------------------------------------------------------------------------------------------------


def installed(package: str) -> Sources | None:
    """Return the installed release of a package, if any."""
    spec = PathFinder.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Sources(package, Path(places[0]).parent) if places else None


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of an unknown version"


def unpacked(path: Path, packages: tuple[str, ...]) -> tuple[Sources, str]:
    """Return the release in a wheel, or in a folder that contains the package, and its version.

    Raises:
        ValueError: the path contains none of ``packages``.
    """
    folder: Folder = zipfile.Path(path) if path.is_file() else path
    for package in packages:
        if (folder / package / "__init__.py").is_file():
            return Sources(package, folder), _version_in(folder, package)
    raise ValueError(f"{path} contains none of {', '.join(packages)}: give a wheel, or the folder that it unpacks to")


def _version_in(folder: Folder, package: str) -> str:
    for each in folder.iterdir():
        if each.name.startswith(f"{package}-") and each.name.endswith(".dist-info"):
            return each.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    for statement in ast.parse((folder / package / "__init__.py").read_text("utf-8")).body:
        is_constant = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        if is_constant and "__version__" in dict(_bound([statement])):
            return str(statement.value.value)  # type: ignore[attr-defined]
    raise ValueError(f"{folder} does not state the version of {package}")
