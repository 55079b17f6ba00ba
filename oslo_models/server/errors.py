"""Errors of the server, in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from oslo_models.deploy.errors import EngineError

_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
_NO_OBJECT = ("missing", "dict_type", "model_attributes_type")
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class RequestError(HTTPException):
    """A request that cannot be answered.

    Attributes:
        code: names the kind of error for programs; ``None``: that of the status.
        param: the field of the request at fault.
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
    """The status of an error, and its body as OpenAI's clients expect it.

    Of errors that the server did not expect it names only the type: their texts may quote what other people sent.
    """
    status, param, code = 500, getattr(error, "param", None), getattr(error, "code", None)
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, (RequestValidationError, ValidationError)):
        found = [_invalid_field(each) for each in error.errors()]
        status, message = 400, "; ".join(text for _, text in found)
        param = found[0][0] or None
    elif isinstance(error, (ValueError, TemplateError)):
        status, message = 400, str(error)
    elif isinstance(error, EngineError):
        status, message = 503, f"{type(error).__name__}: {error}"
    else:
        message = f"internal error ({type(error).__name__}); the log of the server has this request's id"
    return status, body(status, message, param, code if isinstance(code, str) else None)


def headers(error: BaseException) -> dict[str, str]:
    """The headers of an answer beside those of its body."""
    if isinstance(error, EngineError):
        return {"Retry-After": "2"}
    return getattr(error, "headers", None) or {}


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an answer with this status."""
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    text = message.encode("utf-8", "backslashreplace").decode()  # it may quote unpaired surrogates
    return {"error": {"message": text, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def _invalid_field(found: Any) -> tuple[str, str]:
    """Where a field is invalid, and why."""
    path = [str(part) for part in found["loc"] if part != "body"]
    name = ".".join(path)
    if found["type"] == "extra_forbidden":
        return path[0], f"{name} is not supported by this server"
    if found["type"] == "json_invalid":
        return "", "the body is not JSON"
    if not path and found["type"] in _NO_OBJECT:
        return "", "the body is not a JSON object with the header 'Content-Type: application/json'"
    return path[0] if path else "", f"{name}: {found['msg'].removeprefix('Value error, ')}".removeprefix(": ")
