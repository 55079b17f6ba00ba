"""``/tokenize`` and ``/detokenize``, in the format of vLLM."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from oslo_models.server.schema import ChatRequest, Objects, RequestBody, Tokens


class TokenizeRequest(RequestBody):
    """``POST /tokenize``: of a text, or of the messages of a chat."""

    prompt: str | None = None
    messages: Objects | None = Field(default=None, min_length=1)
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("tokenize takes either prompt or messages")
        return self

    @property
    def chat(self) -> ChatRequest | None:
        if self.messages is None:
            return None
        return ChatRequest(messages=self.messages, tools=self.tools, chat_template_kwargs=self.chat_template_kwargs)

    @property
    def texts(self) -> list[Any]:
        return [self.prompt] if self.chat is None else self.chat.prompts

    def encode(self, tokenizer: Any) -> list[int]:
        if self.chat is not None:
            return self.chat.encode(tokenizer)[0]
        return tokenizer(self.prompt, add_special_tokens=self.add_special_tokens)["input_ids"]


class DetokenizeRequest(RequestBody):
    """``POST /detokenize``."""

    tokens: Tokens
