"""Converts the messages of a chat from OpenAI's format to the format of chat templates."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from oslo_models.server.bodies import require_small
from oslo_models.server.images import IMAGE_PARTS, image_url
from oslo_models.server.sounds import SOUND_PARTS, sound_part

_TEXT = (None, "text", "input_text", "output_text")
_UNSUPPORTED = ("function_call", "audio", "refusal")


def template_messages(
    messages: Sequence[dict[str, Any]], template: Any, media: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return messages for a chat template, with all their fields.

    The role ``developer`` becomes ``system`` if the template does not know it.

    Args:
        media: what is kept beside text: ``"images"``, as ``{"image_url": ..., "place": ...}`` beside ``{"text": ...}``,
            and ``"sounds"``, as ``{"sound": ..., "format": ..., "place": ...}``. Content with them stays a list.

    Raises:
        ValueError: a message is not a chat message, or has other content than text. The error has its position.
    """
    knows_developer = "developer" in str(template)
    return [_message(message, f"messages[{index}]", knows_developer, media) for index, message in enumerate(messages)]


def _message(message: dict[str, Any], place: str, knows_developer: bool, media: Sequence[str]) -> dict[str, Any]:
    made = {key: value for key, value in message.items() if value is not None}
    if not isinstance(role := made.get("role"), str) or not role:
        raise ValueError(f"{place} has no role")
    if unsupported := [name for name in _UNSUPPORTED if made.pop(name, None)]:
        raise ValueError(f"{place}.{unsupported[0]} is not supported by this server")
    if role == "developer" and not knows_developer:
        made["role"] = "system"
    made["content"] = _content(made.get("content", ""), f"{place}.content", media)
    calls = made.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls is not a list")
        made["tool_calls"] = [_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return made


def _content(content: Any, place: str, media: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the content of a message. Texts are joined by spaces, as in transformers' server."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} is {type(content).__name__}, neither a text nor a list of parts")
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        here = f"{place}[{number}]"
        if isinstance(part, dict) and "images" in media and part.get("type") in IMAGE_PARTS:
            parts.append({"image_url": image_url(part, here), "place": here})
            continue
        if isinstance(part, dict) and "sounds" in media and part.get("type") in SOUND_PARTS:
            parts.append(sound_part(part, here))
            continue
        if isinstance(part, dict) and part.get("type") not in _TEXT:
            takes = " and ".join(("text", *media))
            raise ValueError(f"{place} of type {part['type']!r} is not supported; this server takes {takes}")
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(f"{place} has a part that is not text")
        parts.append({"text": part["text"]})
    if any("place" in part for part in parts):
        return parts
    return " ".join(part["text"] for part in parts)


def _call(call: Any, place: str) -> dict[str, Any]:
    """Return a tool call with its arguments as a dictionary, because templates iterate over the items."""
    made = copy.deepcopy(call)
    function = made.get("function", made) if isinstance(made, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place} has no function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            require_small(arguments.encode())
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}.function.arguments is not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"{place}.function.arguments is not a JSON object")
    function["arguments"] = arguments
    return dict(made)
