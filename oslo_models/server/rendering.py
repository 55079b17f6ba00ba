"""Renders answers as JSON: large ones in a thread, piece by piece, so that probes get answers meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi.responses import JSONResponse, Response

AT_ONCE = 1 << 13
"""Limit of values in an answer for rendering in the event loop. Below it, a thread switch would take longer."""

_SLICE = 32
"""Number of items of a long list that are encoded at once."""


async def json_response(make: Callable[[], Any], values: int) -> Response:
    """Return a response with the JSON of ``make()``.

    Args:
        values: approximate number of values in the JSON.
    """
    if values <= AT_ONCE:
        return JSONResponse(make())
    return Response(await asyncio.to_thread(lambda: render(make()).encode()), media_type="application/json")


def render(value: Any) -> str:
    """Return JSON. Release the interpreter's lock between parts, unlike Python's encoder."""
    if isinstance(value, dict) and any(isinstance(each, (dict, list)) for each in value.values()):
        return "{" + ",".join(f"{_dumps(key)}:{render(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(each, (dict, list)) for each in value):
        if len(value) <= _SLICE:
            return "[" + ",".join(map(render, value)) + "]"
        return "[" + ",".join(_dumps(value[at : at + _SLICE])[1:-1] for at in range(0, len(value), _SLICE)) + "]"
    return _dumps(value)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
