"""What the output of a request has to be: its format, or a call of a tool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DATA = ("const", "enum", "default", "examples")
"""Keywords of schemas whose values are not schemas."""


def of_format(wanted: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """The grammar of ``response_format``, if it has one, for `Grammar.compiled`. Raises ``ValueError``."""
    if wanted is None:
        return []
    kind = wanted.get("type")
    if kind == "json_object":
        return [("json", {"type": "object"})]
    # OpenAI's chats have the schema inside `json_schema`, its responses beside the type
    schema = (wanted.get("json_schema") or {}).get("schema") if isinstance(wanted.get("json_schema"), dict) else None
    schema = schema if schema is not None else wanted.get("schema")
    if kind == "json_schema" and isinstance(schema, dict):
        return [("json", schema)]
    raise ValueError("response_format: its type is none of text, json_object and json_schema, or it has no schema")


def of_structured(wanted: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """The grammars of vLLM's ``structured_outputs``, for `Grammar.compiled`. Raises ``ValueError``."""
    kinds = {"json": (dict,), "regex": (str,), "choice": (list,), "grammar": (str,)}
    for key, value in (wanted or {}).items():
        if key not in kinds or not isinstance(value, kinds[key]):
            raise ValueError("structured_outputs has {json: schema}, {regex: text}, {choice: texts} or {grammar: text}")
        if key == "choice" and not (value and all(isinstance(each, str) and each for each in value)):
            raise ValueError("structured_outputs: choice is a list of texts")
    return list((wanted or {}).items())


def tool_name(tool: dict[str, Any]) -> str:
    """The name of a tool's function. Raises ``ValueError`` if it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("tools: each has a function with a name")
    return name


def calls_schema(functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a call of one of these functions.

    The parameters of each are a definition, to which the references within them are directed.
    """
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        place = f"#/$defs/{number}"
        definitions[str(number)] = _redirected(function.get("parameters") or {"type": "object"}, place)
        call = {"properties": {"name": {"const": function["name"]}, "arguments": {"$ref": place}}, "type": "object"}
        calls.append({**call, "required": ["name", "arguments"], "additionalProperties": False})
    return {"anyOf": calls, "$defs": definitions}


def _redirected(schema: Any, place: str) -> Any:
    """A schema whose references to its root lead to this place instead."""
    if isinstance(schema, list):
        return [_redirected(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in _DATA else _redirected(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and (target == "#" or target.startswith("#/")):
        made["$ref"] = place + target[1:]
    return made
