"""Compares a value of a recipe with the type of its key. The parser converts strings only."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

YES_OR_NO = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")


def hints_of(dataclass_types: Sequence[type]) -> dict[str, Any]:
    """Return the type hint of each key."""
    return {name: hint for each in dataclass_types for name, hint in get_type_hints(each).items()}


def check_value(key: str, value: Any, hint: Any, choices: Sequence[Any] | None) -> None:
    """Raise ``ValueError`` unless the value of a key has its type and is one of its choices.

    Args:
        choices: the allowed values, or ``None``.
    """
    if choices is not None and value is not None:
        if value not in choices and not (isinstance(value, Enum) and value.value in choices):
            raise ValueError(f"{key}: {value!r} is not one of {', '.join(map(str, choices))}{_quoting(value, choices)}")
        return
    allowed = _alternatives(hint)
    if value is None:
        if type(None) not in allowed:
            raise ValueError(f"{key}: it has no value; give {_describe(allowed)}, or leave the key out")
    elif not any(_fits(value, each) for each in allowed):
        raise ValueError(f"{key}: {value!r} is a {_kind(value)}; give {_describe(allowed)}{_quoting(value, allowed)}")


def _quoting(value: Any, allowed: Sequence[Any]) -> str:
    """Return advice about quotes if YAML may have turned a word into a boolean or number."""
    if isinstance(value, bool) and not value and "no" in allowed:
        return '; YAML reads no as false: write "no" with quotes'
    if isinstance(value, (bool, int, float)) and str in allowed:
        return f'; write "{value}" with quotes'
    return ""


def _alternatives(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [each for one in get_args(hint) for each in _alternatives(one)]
    return [hint]


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint) or hint
    if hint is Any:
        return True
    if hint is bool:
        return isinstance(value, bool) or value in (0, 1) or (isinstance(value, str) and value.lower() in YES_OR_NO)
    if hint in (int, float):
        return _is_number(value, hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        inner = get_args(hint)
        if isinstance(value, str) and inner == (str,):  # such as lora_target_modules: all-linear
            return True
        return isinstance(value, list) and all(not inner or _fits_element(each, inner[0]) for each in value)
    if origin is dict or origin is Mapping:
        return isinstance(value, Mapping) or _is_json_object(value)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value in [each.value for each in origin]
    return isinstance(value, origin) if isinstance(origin, type) else True


def _fits_element(value: Any, hint: Any) -> bool:
    return isinstance(value, Mapping) or any(_fits(value, each) for each in _alternatives(hint))


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, str):  # the parser converts it; YAML reads 2e-5 as a string
        try:
            kind(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int) or (kind is float and isinstance(value, float))


def _is_json_object(value: Any) -> bool:
    try:
        return isinstance(value, str) and isinstance(json.loads(value), dict)
    except ValueError:
        return False


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a mapping"}


def _describe(allowed: Sequence[Any]) -> str:
    words = []
    for each in allowed:
        origin = get_origin(each) or each
        if origin is list:
            inner = get_args(each)
            words.append("a list" + (f" of {_PLURALS.get(inner[0], 'mappings')}" if inner else ""))
        elif origin is not type(None):
            words.append(_NAMES.get(origin, getattr(origin, "__name__", str(origin))))
    return " or ".join(dict.fromkeys(words))


_PLURALS = {int: "integers", float: "numbers", str: "strings"}


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "mapping"}
    return kinds.get(type(value), type(value).__name__)
