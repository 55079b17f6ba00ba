"""Reads the bodies of forms: ``multipart/form-data``, in which clients send files.

A file stays in memory. Its name is ignored, so that no name of a client is ever a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from email.message import Message

from oslo_models.server.errors import RequestError

MOST_FIELDS = 16
"""Limit of the fields of a form."""
_MOST_HEADERS = 4096
"""Limit of the bytes in the headers of a field."""
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")


@dataclass(frozen=True)
class Field:
    """A field of a form.

    Attributes:
        is_file: whether the client sent it with the name of a file.
    """

    name: str
    content: bytes
    is_file: bool


def read_form(content_type: str, body: bytes) -> list[Field]:
    """Return the fields of a form.

    Source: RFC 7578 and RFC 2046, section 5.1.

    Raises:
        RequestError: the body is no form, is cut, or has too many fields.
    """
    message = Message()
    message["content-type"] = content_type
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or boundary is None or not _BOUNDARY.fullmatch(boundary):
        raise RequestError(400, "the body is not a form; send multipart/form-data with a boundary in Content-Type")
    mark = b"--" + boundary.encode()
    if not body.startswith(mark):
        raise RequestError(400, "the form does not begin with its boundary")
    fields: list[Field] = []
    start = len(mark)
    while not body.startswith(b"--", start):
        if len(fields) == MOST_FIELDS:
            raise RequestError(400, f"the form has more than {MOST_FIELDS} fields")
        head = body.find(b"\r\n\r\n", start, start + _MOST_HEADERS)
        end = body.find(b"\r\n" + mark, head + 2)
        if not body.startswith(b"\r\n", start) or head < 0 or end < 0:
            raise RequestError(400, f"the form is cut or damaged in field {len(fields)}")
        name, is_file = _disposition(body[start + 2 : head].decode("utf-8", "replace"), len(fields))
        fields.append(Field(name, body[head + 4 : end], is_file))
        start = end + 2 + len(mark)
    if body[start + 2 :].strip(b"\r\n"):
        raise RequestError(400, "the form goes on after its end")
    return fields


def _disposition(headers: str, number: int) -> tuple[str, bool]:
    """Return the name of a field, and whether it is a file."""
    message = Message()
    for line in headers.split("\r\n"):
        key, separator, value = line.partition(":")
        if not separator or "\r" in value or "\n" in value:
            raise RequestError(400, f"field {number} of the form has a damaged header")
        message[key.strip()] = value.strip()
    if message.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise RequestError(400, f"field {number} of the form has a Content-Transfer-Encoding; send plain bytes")
    name = message.get_param("name", header="content-disposition")
    if message.get_content_disposition() != "form-data" or not isinstance(name, str):
        raise RequestError(400, f"field {number} of the form has no name")
    names = {key.lower() for key, _ in message.get_params(failobj=[], header="content-disposition")}
    return name, bool(names & {"filename", "filename*"})
