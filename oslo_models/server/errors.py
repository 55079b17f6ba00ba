"""Errors of the server, in the format of OpenAI's API."""

from __future__ import annotations

import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from oslo_models.deploy.errors import EngineError

_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
_NO_OBJECT = ("model_type", "missing", "dict_type", "model_attributes_type")
MESSAGE, NAME = 1000, 64
"""Limits of characters in an error message, and in each quote from a request."""
PROBLEMS = 50
"""Limit of problems in a body that the message lists."""
_LONG = re.compile(r"\S{65,}")
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(HTTPException):
    """A request that the server cannot answer.

    Attributes:
        code: machine-readable kind of error; ``None`` for the default of the status.
        param: the invalid field of the request.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param


def problem(error: BaseException) -> tuple[int, dict[str, Any]]:
    """Return the status of an error, and its body in the format of OpenAI's clients.

    For unexpected errors, the body names the type only, because their texts may quote requests of other users.
    """
    status, param, code = 500, getattr(error, "param", None), getattr(error, "code", None)
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, (RequestValidationError, ValidationError)):
        status, (message, param) = 400, invalid_fields(error)
    elif isinstance(error, (ValueError, TemplateError)):
        status, message = 400, str(error)
    elif isinstance(error, EngineError):
        status, message = 503, f"{type(error).__name__}: {error}"
    else:
        message = f"internal error ({type(error).__name__}); the log of the server has this request's id"
    return status, body(status, message, param, code if isinstance(code, str) else None)


def headers(error: BaseException) -> dict[str, str]:
    """Return the extra headers for an error."""
    if isinstance(error, EngineError):
        return {"Retry-After": "2"}
    return getattr(error, "headers", None) or {}


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the response body for an error with this status."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    message = _LONG.sub(lambda found: _short(found[0], NAME), message)
    text = _short(message, MESSAGE).encode("utf-8", "backslashreplace").decode()  # it may quote unpaired surrogates
    param = None if param is None else _short(param, NAME).encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": text, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def invalid_fields(error: RequestValidationError | ValidationError) -> tuple[str, str | None]:
    """Describe the invalid fields of a body. Return the message and the name of the first field."""
    count = error.error_count() if isinstance(error, ValidationError) else 1
    if count > PROBLEMS:  # rendering many problems takes long
        return f"the body has {count} problems; its lists and objects do not belong to this request", None
    options = {"include_url": False, "include_context": False, "include_input": False}
    raw = error.errors(**options) if isinstance(error, ValidationError) else error.errors()
    found = [_invalid_field(each) for each in raw]
    return "; ".join(text for _, text in found), found[0][0] or None


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _invalid_field(found: Any) -> tuple[str, str]:
    """Return the name of an invalid field, and the reason."""
    path = [str(part) for part in found["loc"] if part != "body"]
    path = [_short(part, NAME) for part in path[:4]]
    name = ".".join(path)
    if found["type"] == "extra_forbidden":
        return path[0], f"{name} is not supported by this server"
    if found["type"] == "json_invalid":
        return "", "the body is not JSON"
    if not path and found["type"] in _NO_OBJECT:
        return "", "the body is not a JSON object with the header 'Content-Type: application/json'"
    return path[0] if path else "", f"{name}: {found['msg'].removeprefix('Value error, ')}".removeprefix(": ")
