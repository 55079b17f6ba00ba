"""Requests, answers and errors of the server, in the format of OpenAI's API."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from fastapi.exceptions import RequestValidationError
from jinja2 import TemplateError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException
from transformers.cli.serving.utils import BaseHandler, Modality, ToolCall

from oslo_models.deploy.errors import EngineError
from oslo_models.deploy.generation_limits import LEAST, MOST, is_scale


def _scale(value: float) -> float:
    if not is_scale(value):
        raise ValueError(f"must be 0 or {LEAST:g} to {MOST:g}")
    return value


Scale = Annotated[float, AfterValidator(_scale)]
Bias = Annotated[float, Field(ge=-100, le=100)]  # as OpenAI's; NaN is not between them


class Generation(BaseModel):
    """The fields common to all endpoints: OpenAI's, and some of transformers' `generate`.

    Unsupported fields are rejected, unless their value is empty and so would not change the answer.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: Scale | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    repetition_penalty: Scale | None = Field(default=None, gt=0)
    num_beams: int | None = Field(default=None, ge=1, le=16)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    logit_bias: dict[int, Bias] = {}
    n: int = Field(default=1, ge=1)
    stop: str | list[str] = Field(default=[], max_length=256)
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, bool] = {}
    user: Any = None
    metadata: Any = None
    store: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, body: Any) -> Any:
        _require_text(body)
        if not isinstance(body, dict):
            return body
        return {key: value for key, value in body.items() if value is not None and (key in cls.model_fields or value)}

    def settings(self, defaults: Any) -> dict[str, Any]:
        """Arguments of `generate`. It samples if the request, or else the model's own configuration, says so."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "num_beams", "no_repeat_ngram_size")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        by_default = defaults.do_sample or self.top_p or self.top_k
        samples = bool(by_default if self.temperature is None else self.temperature)
        if not samples:
            given = {name: value for name, value in given.items() if name not in ("temperature", "top_p", "top_k")}
        if self.logit_bias:
            given["sequence_bias"] = {(token,): bias for token, bias in self.logit_bias.items()}
        return {**given, "do_sample": samples}

    @property
    def stops(self) -> list[str]:
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]


def _require_text(body: Any) -> None:
    """Raise ``ValueError`` if a string or key anywhere in the body has an unpaired surrogate, which is no text."""
    left = [(None, body)]
    while left:  # not recursive: the body may be nested as deeply as JSON allows
        place, value = left.pop()
        if isinstance(value, dict):
            left += [(place, key) for key in value]
            left += [(place or key, item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(place, item) for item in value]
        elif isinstance(value, str) and not _is_text(value):
            where = f"the value of {place!r}" if isinstance(place, str) and _is_text(place) else "a key"
            raise ValueError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff by itself), which is no text")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    kind: ClassVar = ("cmpl", "text_completion", "text_completion")
    prompt: str | list[str] | list[int] | list[list[int]] = Field(min_length=1)

    def encode(self, tokenizer: Any) -> list[list[int]]:
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if single else list(self.prompt)
        return [tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in prompts]

    def max_new_tokens(self, room: int) -> int:
        return self.max_tokens or min(16, room)  # OpenAI's default

    def choice(self, answer: Answer, delta: bool, first: bool) -> dict[str, Any]:
        return {"text": answer.content, "logprobs": None}


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    kind: ClassVar = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None

    def encode(self, tokenizer: Any) -> list[list[int]]:
        if not tokenizer.chat_template:
            raise ValueError("this model has no chat template; use /v1/completions")
        try:
            messages = BaseHandler.get_processor_inputs_from_messages(self.messages, Modality.LLM)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"messages: not those of a chat ({type(error).__name__}: {error})") from error
        options = {"add_generation_prompt": True, "return_dict": True, "tools": self.tools}
        try:
            return [tokenizer.apply_chat_template(messages, **options)["input_ids"]]
        except (
            LookupError,
            TypeError,
            AttributeError,
        ) as error:  # what templates raise for messages they do not expect
            raise ValueError(f"messages: the chat template cannot write them ({error})") from error

    def max_new_tokens(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or min(1024, room)

    def choice(self, answer: Answer, delta: bool, first: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"} if first else {}
        message["content"] = answer.content if answer.content or not answer.tool_calls else None
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message["tool_calls"] = [
                {"index": index, "id": f"call_{uuid.uuid4().hex[:16]}", "type": "function", "function": vars(call)}
                for index, call in answer.tool_calls
            ]
        return {"delta" if delta else "message": message}


@dataclass
class Answer:
    """A complete answer, or a piece of one; only the last piece has ``tokens`` and ``finish``."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[int, ToolCall]] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None


class Stops:
    """Passes text on up to the first stop string; holds back a suffix that may become one."""

    def __init__(self, stops: list[str]) -> None:
        self.stops, self.held, self.hit = stops, "", False

    def feed(self, text: str) -> str:
        text = self.held + text
        found = [at for stop in self.stops if (at := text.find(stop)) >= 0]
        self.hit = bool(found)
        pairs = ((stop, k) for stop in self.stops for k in range(1, min(len(stop), len(text) + 1)))
        ends = (len(text) - k for stop, k in pairs if text.endswith(stop[:k]))
        stop_at = min(found) if found else min(ends, default=len(text))
        self.held = text[stop_at:]
        return text[:stop_at]


def tally(prompts: list[list[int]], answers: list[int]) -> dict[str, int]:
    asked, new = sum(map(len, prompts)), sum(answers)
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status of an error, and its body as OpenAI's clients expect it."""
    if isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, (RequestValidationError, ValidationError)):
        places = [(".".join(str(part) for part in found["loc"] if part != "body"), found) for found in error.errors()]
        status, message = 400, "; ".join(f"{place}: {found['msg']}".lstrip(": ") for place, found in places)
    elif isinstance(error, (ValueError, TemplateError)):
        status, message = 400, str(error)
    else:
        status = 503 if isinstance(error, EngineError) else 500
        message = f"{type(error).__name__}: {error}"
    message = message.encode("utf-8", "backslashreplace").decode()  # it may quote unpaired surrogates
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else kind
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}
