"""Structured output of a request: a response format, or a tool call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DATA = ("const", "enum", "default", "examples")
"""Schema keywords with plain data as values, not schemas."""


def of_format(wanted: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the grammar of ``response_format``, if any, for `Grammar.compiled`. Raises ``ValueError``."""
    if wanted is None:
        return []
    kind = wanted.get("type")
    if kind == "json_object":
        return [("json", {"type": "object"})]
    # OpenAI's chat API has the schema inside `json_schema`; the responses API has it beside the type.
    schema = (wanted.get("json_schema") or {}).get("schema") if isinstance(wanted.get("json_schema"), dict) else None
    schema = schema if schema is not None else wanted.get("schema")
    if kind == "json_schema" and isinstance(schema, dict):
        return [("json", schema)]
    raise ValueError("response_format: its type must be text, json_object or json_schema, with a schema")


def of_structured(wanted: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """Return the grammars of vLLM's ``structured_outputs``, for `Grammar.compiled`. Raises ``ValueError``."""
    kinds = {"json": (dict,), "regex": (str,), "choice": (list,), "grammar": (str,)}
    for key, value in (wanted or {}).items():
        if key not in kinds or not isinstance(value, kinds[key]):
            raise ValueError("structured_outputs has {json: schema}, {regex: text}, {choice: texts} or {grammar: text}")
        if key == "choice" and not (value and all(isinstance(each, str) and each for each in value)):
            raise ValueError("structured_outputs: choice is a list of texts")
    return list((wanted or {}).items())


def tool_name(tool: dict[str, Any]) -> str:
    """Return the name of a tool's function. Raise ``ValueError`` if it has no name."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("tools: each has a function with a name")
    return name


def calls_schema(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these functions.

    The parameters of each function become a definition. References inside the parameters point into this definition.
    """
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        definitions[str(number)] = _redirected(function.get("parameters") or {"type": "object"}, place)
        call = {"properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}}, "type": "object"}
        calls.append({**call, "required": ["name", "arguments"], "additionalProperties": False})
    return {"anyOf": calls, "$defs": definitions}


def _redirected(schema: Any, place: str) -> Any:
    """Return a copy of a schema, with references to its root redirected to ``place``."""
    if isinstance(schema, list):
        return [_redirected(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in _DATA else _redirected(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        made["$ref"] = place + target[1:]
    return made
