"""Fingerprints of source code: equal if only formatting, comments, docstrings, annotations or local names differ.

This module walks the syntax tree itself, because the output of ``ast.dump`` and ``ast.unparse`` depends on the Python
version. It skips absent fields, so new fields in later Python versions do not change fingerprints.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
_IGNORED = frozenset(("annotation", "returns", "type_comment", "type_params", "ctx", "kind", "decorator_list", "name"))
"""Fields without effect on the results of a function. Decorators are handled separately."""
_NEUTRAL = frozenset(("auto_docstring", "deprecate_kwarg"))
"""Decorators without effect for the arguments that transformers itself passes."""


def fingerprint(function: Function) -> str:
    """Return the fingerprint of a function. Copies of the function in other models have the same fingerprint."""
    renamed = {name: f"local{index}" for index, name in enumerate(_local_names(function))}
    tokens = (*_decorators(function), *_walk(function, renamed))
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()[:16]


def combined(statements: list[ast.stmt]) -> str:
    """Return the fingerprint of the body of a function without parameters."""
    (function,) = ast.parse("def _(): ...").body
    assert isinstance(function, ast.FunctionDef)
    function.body = statements
    return fingerprint(function)


def parameters(function: Function) -> tuple[str, ...]:
    """Return the parameter names of a function, in order. Variadic parameters start with ``*`` or ``**``."""
    args = function.args
    named = [each.arg for each in (*args.posonlyargs, *args.args)]
    rest = [f"*{args.vararg.arg}"] if args.vararg else []
    last = [f"**{args.kwarg.arg}"] if args.kwarg else []
    return (*named, *rest, *(each.arg for each in args.kwonlyargs), *last)


def _decorators(function: Function) -> Iterator[str]:
    """Yield the names of the decorators that may change the results of a function."""
    for each in function.decorator_list:
        called = each.func if isinstance(each, ast.Call) else each
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name not in _NEUTRAL:
            yield f"@{name}"


def _local_names(function: Function) -> list[str]:
    """Return the names that a function assigns, without its parameters, in order of appearance."""
    given = {name.lstrip("*") for name in parameters(function)}
    outer = {name for node in ast.walk(function) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names}
    stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored.sort(key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.id for node in stored if node.id not in given | outer))


def _walk(node: ast.AST, renamed: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign):
        if node.value is None:
            return
        node = ast.Assign(targets=[node.target], value=node.value)
    yield type(node).__name__
    if isinstance(node, ast.Constant):
        yield f"{type(node.value).__name__} {node.value!a}"
        return
    if isinstance(node, ast.Name):
        yield renamed.get(node.id, node.id)
        return
    for field in node._fields:
        value = getattr(node, field, None)
        if field in _IGNORED or value is None or value == []:
            continue
        yield f".{field}"
        if field == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            value = _without_docstring(value)
        if isinstance(node, ast.JoinedStr):
            value = [
                each for each in value if not (isinstance(each, ast.Constant) and each.value == "")
            ]  # Python 3.12.1
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _walk(each, renamed)
            else:
                yield each if isinstance(each, str) else ascii(each)
    yield "end"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented and isinstance(first.value.value, str) else body  # type: ignore[attr-defined]
