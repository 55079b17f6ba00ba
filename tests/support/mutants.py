"""Puts mistakes into the library while a test runs, to check that the test fails."""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import pytest

from support import ROOT
from support.pool import Pool

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Edit:
    """A mistake in one function: a piece of its source, and the replacement.

    Attributes:
        function: ``module:name`` or ``module:Class.name``, in ``oslo_models``.
        old: a piece that is in its source once.
        new: what replaces it.
    """

    function: str
    old: str
    new: str

    def __call__(self, patch: Patch) -> None:
        """Replace the code of the function in place, so that modules that have imported it run the mistake too.

        Raises:
            LookupError: the function, or the piece of its source, is not there (any more).
        """
        function = self._find()
        source = self.source().replace(self.old, self.new)
        if "__class__" in function.__code__.co_freevars:  # uses super()
            source = "def around(__class__):\n" + textwrap.indent(source, "    ")
        flags = __future__.annotations.compiler_flag
        compiled = compile(source, inspect.getfile(function), "exec", flags, dont_inherit=True)
        patch.setattr(function, "__code__", next(_codes_of(compiled, function.__name__)))

    def source(self) -> str:
        """Return the source of the function.

        Raises:
            LookupError: the function is missing, or has the piece not exactly once.
        """
        source = textwrap.dedent(inspect.getsource(self._find()))
        if source.count(self.old) != 1:
            raise LookupError(f"{self.old!r} is {source.count(self.old)} times in {self.function}")
        return source

    def _find(self) -> Any:
        module, _, path = self.function.partition(":")
        found: Any = importlib.import_module(f"oslo_models.{module}")
        for name in path.split("."):
            if isinstance(found, (type, ModuleType)):
                if name not in vars(found):
                    raise LookupError(f"there is no {self.function}")
                found = vars(found)[name]
            else:
                found = getattr(found, name)  # the functions of a property
        return inspect.unwrap(getattr(found, "__func__", found))


def _codes_of(code: CodeType, name: str) -> Iterator[CodeType]:
    """Yield the code objects of functions with a name, outer functions first."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_name == name:
                yield inner
            yield from _codes_of(inner, name)


def with_mutant(make: Callable[[Patch], None], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        make(patch)
        return function(*args, **kwargs)


class MutantPool:
    """A pool with a mistake in the library of its workers."""

    def __init__(self, pool: Pool, make: Callable[[Patch], None]) -> None:
        self.pool, self.make = pool, make

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return self.pool.run(world_size, with_mutant, self.make, function, *args, **kwargs)


def load_module(file: str) -> ModuleType:
    """Import a file below ``tests/``."""
    path = ROOT / "tests" / file
    if str(path.parent) not in sys.path:  # this run collected no tests of its folder
        sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def load_test(file: str, name: str) -> Callable[..., None]:
    """Return a test function of a file below ``tests/``."""
    test: Callable[..., None] = getattr(load_module(file), name)
    return test


def is_in_run(request: Any, file: str, name: str, arguments: dict[str, Any]) -> bool:
    """Whether this run includes the test with these arguments, and thus shows that it passes."""
    path, missing = ROOT / "tests" / file, object()
    for item in request.session.items:
        if item.path == path and getattr(item, "originalname", None) == name:
            given = item.callspec.params if hasattr(item, "callspec") else {}
            if all(given.get(key, missing) == value for key, value in arguments.items()):
                return True
    return False


def assert_is_caught(request: Any, pool: Pool, edit: Edit, file: str, name: str, arguments: dict[str, Any]) -> None:
    """Assert that a test passes (unless the run shows it anyway), and fails with a mistake.

    Args:
        request: pytest's request, for the fixtures of the test.
        file: the file of the test, below ``tests/``.
        arguments: arguments that are not fixtures.
    """
    test = load_test(file, name)
    wanted = [each for each in inspect.signature(test).parameters if each not in arguments]
    given = {**{each: request.getfixturevalue(each) for each in wanted}, **arguments}

    def in_folder(number: int) -> dict[str, Any]:
        if "tmp_path" not in given:
            return given
        folder = given["tmp_path"] / str(number)
        folder.mkdir()
        return {**given, "tmp_path": folder}

    if not is_in_run(request, file, name, arguments):
        test(**in_folder(0))
    mutated = {"pool": MutantPool(pool, edit)} if "pool" in given else {}
    with pytest.MonkeyPatch.context() as patch:
        edit(patch)
        with pytest.raises((Exception, pytest.fail.Exception)):
            test(**{**in_folder(1), **mutated})
