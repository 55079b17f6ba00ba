"""Requests for transcripts, and the formats of their answers, as in OpenAI's API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import Field, ValidationError, model_validator

from oslo_models.server.errors import RequestError, invalid_fields
from oslo_models.server.forms import Field as FormField
from oslo_models.server.schema import Generation, RequestBody, Scale

MOST_PROMPT = 8192
"""Limit of characters in the prompt of a transcript."""
TIMED = ("verbose_json", "srt", "vtt")
"""Formats of answers with times."""
_LISTS = ("timestamp_granularities[]", "timestamp_granularities")


class TranscriptionRequest(RequestBody):
    """The fields of ``POST /v1/audio/transcriptions``, without the file."""

    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Generation.no_ops, "stream": ("false", "False", "0")}
    language: str | None = Field(default=None, min_length=1, max_length=64)
    prompt: str | None = Field(default=None, max_length=MOST_PROMPT)
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Scale = Field(default=0.0, ge=0, le=1)
    timestamp_granularities: list[str] = ["segment"]

    @model_validator(mode="after")
    def _check(self) -> TranscriptionRequest:
        if unknown := sorted(set(self.timestamp_granularities) - {"segment"}):
            raise ValueError(f"timestamp_granularities has {unknown[0]!r:.64}; this server has segments only")
        if self.timestamp_granularities != ["segment"] and self.response_format != "verbose_json":
            raise ValueError("timestamp_granularities needs response_format=verbose_json")
        return self

    @property
    def timed(self) -> bool:
        """Whether the answer has times."""
        return self.response_format in TIMED

    @classmethod
    def of_form(cls, fields: Sequence[FormField]) -> tuple[TranscriptionRequest, bytes]:
        """Return the request and the bytes of its file.

        Raises:
            RequestError: a field is missing, unknown, given twice or invalid.
        """
        found: dict[str, Any] = {}
        file: bytes | None = None
        for each in fields:
            if each.name == "file":
                if file is not None:
                    raise RequestError(400, "the form has two files", None, "file")
                file = each.content
                continue
            if each.is_file:
                raise RequestError(400, f"the form has a file in the field {each.name[:64]!r}; send it as file")
            try:
                text = each.content.decode()
            except UnicodeDecodeError:
                raise RequestError(400, f"the field {each.name[:64]!r} is not text in UTF-8") from None
            if each.name in _LISTS:
                found.setdefault("timestamp_granularities", []).append(text)
            elif each.name in found:
                raise RequestError(400, f"the form has the field {each.name[:64]!r} twice")
            else:
                found[each.name] = text
        if not file:
            raise RequestError(400, "the form has no file", None, "file")
        try:
            return cls.model_validate(found), file
        except ValidationError as error:
            message, param = invalid_fields(error)
            raise RequestError(400, message, None, param) from None


@dataclass(frozen=True)
class Segment:
    """A piece of a transcript. Times are in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass
class Transcript:
    """The text of a sound.

    Attributes:
        seconds: length of the sound.
        segments: pieces of the text with times, if they were asked for.
        language: code of the language, if times were asked for.
    """

    text: str
    seconds: float
    segments: list[Segment] = field(default_factory=list)
    language: str | None = None

    def response(self, request: TranscriptionRequest, task: str) -> Response:
        """Return the answer in the format of the request."""
        if request.response_format == "text":
            return PlainTextResponse(self.text + "\n")
        if request.response_format == "srt":
            return PlainTextResponse(self._subtitles("", ",", numbered=True))
        if request.response_format == "vtt":
            return PlainTextResponse(self._subtitles("WEBVTT\n\n", ".", numbered=False), media_type="text/vtt")
        usage = {"type": "duration", "seconds": math.ceil(self.seconds)}
        if request.response_format == "json":
            return JSONResponse({"text": self.text, "usage": usage})
        segments = [{"id": number, **vars(each)} for number, each in enumerate(self.segments)]
        segments = [{**each, "temperature": request.temperature} for each in segments]
        head = {"task": task, "language": self.language, "duration": self.seconds}
        return JSONResponse({**head, "text": self.text, "segments": segments, "usage": usage})

    def _subtitles(self, head: str, comma: str, numbered: bool) -> str:
        pieces = []
        for number, each in enumerate(self.segments, 1):
            count = f"{number}\n" if numbered else ""
            text = each.text.strip().replace("-->", "->")
            pieces.append(f"{count}{clock(each.start, comma)} --> {clock(each.end, comma)}\n{text}\n\n")
        return head + "".join(pieces)


def clock(seconds: float, comma: str) -> str:
    """Return a time of subtitles: hours, minutes, seconds and milliseconds."""
    total = round(seconds * 1000)
    minutes, rest = divmod(total, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{comma}{rest % 1000:03}"
