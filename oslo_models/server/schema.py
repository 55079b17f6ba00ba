"""Fields of requests for text in the format of OpenAI's API, and their arguments for `generate`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from transformers import PreTrainedTokenizerBase

from oslo_models.deploy.generation_limits import LEAST, MOST, is_scale
from oslo_models.server.images import IMAGE_PARTS
from oslo_models.server.media_chats import MediaChats
from oslo_models.server.messages import template_messages
from oslo_models.server.sounds import SOUND_PARTS
from oslo_models.server.structured import calls_schema, of_format, of_structured, tool_name

MOST_STOPS, LONGEST_STOP = 32, 256
"""Limits of stop strings in a request, and of characters in each."""
MOST_LOGPROBS, MOST_BIASES, MOST_BEAMS = 20, 1024, 16
_NO_OPS: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "truncation": ("disabled",),
    "background": (False,),
    "top_logprobs": (0,),
    "function_call": ("none", "auto"),
}
"""Values of a field without an effect."""


def _scale(value: float) -> float:
    if not is_scale(value):
        raise ValueError(f"must be 0 or {LEAST:g} to {MOST:g}")
    return value


Scale = Annotated[float, AfterValidator(_scale)]
Bias = Annotated[float, Field(ge=-100, le=100)]  # as OpenAI's; NaN is not between them
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
FEW = 16
"""Limit of unknown fields that are checked one by one."""
MOST_ITEMS = 8192
"""Limit of messages, tools and keys in one request."""


def _with_few_keys(most: int) -> BeforeValidator:
    """Refuse an object with too many keys before its keys are checked one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"has {len(value)} keys, more than {most}")
        return value

    return BeforeValidator(check)


First = Field(fail_fast=True)
"""Stops validation at the first invalid item of a list. Otherwise each item would produce a message."""
Objects = Annotated[list[dict[str, Any]], First, Field(max_length=MOST_ITEMS)]
Tokens = Annotated[list[int], First]
_SOME = Field(min_length=1)
_Lists = Annotated[list[str], First, _SOME] | Annotated[list[int], First, _SOME] | Annotated[list[Tokens], First, _SOME]
Texts = str | _Lists
"""Texts or tokens. A text may be empty, because tokenizers may add a token at its start."""


class RequestBody(BaseModel):
    """Base class of all requests.

    Unsupported fields are refused, unless their value is empty or has no effect.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = _NO_OPS
    user: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None  # these three have no effect on the answer
    prompt_cache_retention: Any = None
    safety_identifier: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_no_ops(cls, body: Any) -> Any:
        if isinstance(body, dict) and len(body) > len(cls.model_fields) + len(_NO_OPS) + FEW:
            raise ValueError(f"the body has {len(body)} fields, but this server has {len(cls.model_fields)} fields")
        _require_text(body)
        if not isinstance(body, dict):
            return body
        own = cls.model_fields
        unknown = [key for key, value in body.items() if key not in own and not cls._is_no_op(key, value)]
        if len(unknown) > FEW:
            names = ", ".join(key[:64] for key in unknown[:3])
            raise ValueError(f"{names} and {len(unknown) - 3} more fields are not supported by this server")
        return {key: value for key, value in body.items() if not cls._is_no_op(key, value)}

    @classmethod
    def _is_no_op(cls, key: str, value: Any) -> bool:
        if value is None or any(_equal(value, nothing) for nothing in cls.no_ops.get(key, ())):
            return True
        return key not in cls.model_fields and value in ("", [], {})


def _equal(value: Any, other: Any) -> bool:
    """Return whether JSON values are equal. ``true`` does not equal 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


class Generation(RequestBody):
    """Fields of requests for text, from OpenAI's API, and some from vLLM and transformers' `generate`."""

    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: Scale | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: Scale | None = Field(default=None, gt=0)
    num_beams: int | None = Field(default=None, ge=1, le=MOST_BEAMS)
    no_repeat_ngram_size: int | None = Field(default=None, ge=0)
    logit_bias: Annotated[dict[int, Bias], _with_few_keys(MOST_BIASES)] = Field(default={}, max_length=MOST_BIASES)
    n: int = Field(default=1, ge=1)
    best_of: int | None = Field(default=None, ge=1)
    stop: Stop | Annotated[list[Stop], First, Field(max_length=MOST_STOPS)] = []
    stop_token_ids: Tokens = Field(default=[], max_length=MOST_STOPS)
    skip_special_tokens: bool = True
    seed: int | None = None
    stream: bool = False
    stream_options: Annotated[dict[str, bool], _with_few_keys(FEW)] = {}
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    store: Any = None

    @model_validator(mode="after")
    def _check(self) -> Generation:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of={self.best_of} is not supported by this server, except as n={self.n}")
        if unknown := set(self.stream_options) - {"include_usage", "include_obfuscation"}:
            raise ValueError(f"stream_options has {sorted(unknown)}; include_usage is supported")
        return self

    @property
    def logprobs_asked(self) -> int | None:
        """Number of alternatives to report per token; ``None`` for no log-probabilities."""
        return None

    @property
    def grammar(self) -> tuple[str, Any] | None:
        """The grammar of the text, for `Grammar.compiled`.

        Raises:
            ValueError: the request has two grammars, or an unknown kind of grammar.
        """
        found = [*of_format(self.response_format), *of_structured(self.structured_outputs)]
        if len(found) > 1:
            raise ValueError("response_format, structured_outputs and tool_choice give more than one grammar; use one")
        return found[0] if found else None

    @property
    def stops(self) -> list[str]:
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]


def _require_text(body: Any) -> None:
    """Raise ``ValueError`` if a string or key anywhere in the body has an unpaired surrogate."""
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
            raise ValueError(f"{where} has half of a surrogate pair (\\ud800 to \\udfff alone), which is not text")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class CompletionRequest(Generation):
    """``POST /v1/completions``."""

    kind: ClassVar[tuple[str, str, str]] = ("cmpl", "text_completion", "text_completion")
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_NO_OPS, "add_special_tokens": (True,)}
    param: ClassVar[str] = "prompt"
    continues_prompt: ClassVar[bool] = True
    prompt: Texts
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def logprobs_asked(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each as text or tokens."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else list(self.prompt)

    def encode(self, tokenizer: Any) -> list[list[int]]:
        return [tokenizer(each)["input_ids"] if isinstance(each, str) else each for each in self.prompts]

    def max_new_tokens(self, room: int, default: int | None) -> int:
        """Return the limit of answer tokens; default: 16, as in OpenAI's API."""
        return self.max_tokens or min(16, room)


class ChatRequest(Generation):
    """``POST /v1/chat/completions``."""

    kind: ClassVar[tuple[str, str, str]] = ("chatcmpl", "chat.completion", "chat.completion.chunk")
    no_ops: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_NO_OPS, "add_special_tokens": (False,)}
    param: ClassVar[str] = "messages"
    messages: Objects = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer continues the text of the prompt. Otherwise it is a new message."""
        return self.continue_final_message

    @property
    def logprobs_asked(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that must be called; empty for any tool; ``None`` if no call is required."""
        if self.tool_choice in ("auto", "none"):
            return None
        names = [tool_name(tool) for tool in self.tools or ()]
        wanted: Any = self.tool_choice
        if isinstance(wanted, dict):
            function = wanted.get("function", wanted)
            wanted = function.get("name") if isinstance(function, dict) else None
            if wanted not in names:
                raise ValueError(f"tool_choice names no tool of the request; it has {names}")
            return str(wanted)
        if wanted != "required" or not names:
            raise ValueError("tool_choice must be none, auto, required (with tools) or {function: {name: ...}}")
        return ""

    @property
    def grammar(self) -> tuple[str, Any] | None:
        wanted, forced = super().grammar, self.forced_tool
        if forced is None:
            return wanted
        if wanted is not None:
            raise ValueError("response_format, structured_outputs and tool_choice give more than one grammar; use one")
        functions = [tool["function"] for tool in self.tools or () if forced in ("", tool_name(tool))]
        return "json", calls_schema(functions)

    @property
    def visible_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    def _for_template(self, template: Any, media: Sequence[str] = ()) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the messages and the options for a chat template."""
        if not template:
            raise ValueError("this model has no chat template; use /v1/completions")
        reserved = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"enable_thinking"}
        if taken := sorted(reserved & set(self.chat_template_kwargs)):
            raise ValueError(f"chat_template_kwargs cannot set {taken}; it sets variables of the template")
        messages = template_messages(self.messages, template, media)
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message needs add_generation_prompt=false")
        names = ("add_generation_prompt", "continue_final_message")
        options = {"tools": self.visible_tools, **{name: getattr(self, name) for name in names}}
        return messages, {**options, **self.chat_template_kwargs}

    def encode(self, tokenizer: Any) -> list[list[int]]:
        messages, options = self._for_template(tokenizer.chat_template)
        with _template_errors():
            return [tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]]

    def encode_with_media(self, chats: MediaChats) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of the prompt, and the further arguments of ``generate``."""
        messages, options = self._for_template(chats.template, chats.kinds)
        with _template_errors():
            return chats.encode(messages, options)

    @property
    def prompts(self) -> list[Any]:
        """The joined texts of the messages, before the chat template. Used to check the length of the prompt."""
        return ["".join(_texts(self.messages))]

    def max_new_tokens(self, room: int, default: int | None) -> int:
        """Return the limit of answer tokens; default: the checkpoint's limit, or 1024."""
        return self.max_completion_tokens or self.max_tokens or min(default or 1024, room)


@contextmanager
def _template_errors() -> Iterator[None]:
    """Report the errors that templates raise for messages that they do not expect."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"messages: the chat template failed ({error})") from error


def _texts(value: Any) -> list[str]:
    """Return all strings in a nested value, without images and sounds."""
    found, left = [], [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, dict) and each.get("type") in (*IMAGE_PARTS, *SOUND_PARTS):
            continue
        elif isinstance(each, (dict, list)):
            left += each.values() if isinstance(each, dict) else each
    return found
