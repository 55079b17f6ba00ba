"""``/v1/responses``: OpenAI's newer chat API. The server stores nothing between requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import Field

from oslo_models.server.answers import Answer, event
from oslo_models.server.images import IMAGE_PARTS
from oslo_models.server.schema import ChatRequest, First, Objects, RequestBody, Stop
from oslo_models.server.sounds import SOUND_PARTS

_PASSED_ON: tuple[str, ...] = ("model", "temperature", "top_p", "num_beams", "stream", "seed", "stop")
_PASSED_ON += ("parallel_tool_calls", "chat_template_kwargs")


class ResponsesRequest(RequestBody):
    """``POST /v1/responses``."""

    input: str | Annotated[Objects, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    num_beams: int | None = None
    stream: bool = False
    stream_options: dict[Literal["include_obfuscation"], bool] = {}
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], First] = []
    tools: Objects = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}
    store: Any = None

    def chat(self) -> ChatRequest:
        """Convert to a chat request.

        Raises:
            ValueError: an item is no message, function call or function output, or a tool is no function.
        """
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages += [_message(item) for item in items]
        fields = {name: getattr(self, name) for name in _PASSED_ON}
        if unknown := sorted(set(self.text) - {"format", "verbosity"}):
            raise ValueError(f"text has {unknown}; format is supported")
        fields |= {"messages": messages, "response_format": self.text.get("format"), "tool_choice": self.tool_choice}
        fields |= {
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.tools] or None,
        }
        return ChatRequest(**fields)


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """Convert an input item to a chat message."""
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind != "message":
        raise ValueError(f"input: items of type {kind!r} are not supported by this server")
    content = item.get("content")
    if isinstance(content, list):
        media = (*IMAGE_PARTS, *SOUND_PARTS)
        kinds = ("input_text", "output_text", "text", *media)
        if not all(isinstance(part, dict) and part.get("type") in kinds for part in content):
            raise ValueError("input: this server supports text, images and sounds as the content of a message")
        content = [part if part["type"] in media else {"type": "text", "text": part.get("text")} for part in content]
    return {"role": item.get("role"), "content": content}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValueError(f"tools of type {tool.get('type')!r} are not supported by this server; functions are")
    return {"type": "function", "function": {key: tool[key] for key in tool if key not in ("type", "strict")}}


class Response:
    """A response while it is generated."""

    def __init__(self, request: ResponsesRequest, model: str, prompt: list[int]) -> None:
        self._prompt, self.answer = prompt, Answer()
        self._message_id, self._call_ids = f"msg_{uuid.uuid4().hex}", list[str]()
        same = ("instructions", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls", "metadata")
        self._head: dict[str, Any] = {
            **{"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model},
            **{"error": None, "incomplete_details": None, "previous_response_id": None, "store": False},
            **{"max_output_tokens": request.max_output_tokens, **{name: getattr(request, name) for name in same}},
            "text": {"format": request.text.get("format") or {"type": "text"}},
        }

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.answer.content, "annotations": []}

    def message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item for the text."""
        item = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**item, "status": status, "content": content}

    def calls(self) -> list[dict[str, Any]]:
        """Return the items for the tool calls."""
        while len(self._call_ids) < len(self.answer.tool_calls):
            self._call_ids.append(uuid.uuid4().hex)
        return [
            {
                "type": "function_call",
                "id": f"fc_{made}",
                "call_id": f"call_{made}",
                "status": "completed",
                **vars(call),
            }
            for made, (_, call) in zip(self._call_ids, self.answer.tool_calls, strict=True)
        ]

    def body(self, status: str | None = None) -> dict[str, Any]:
        """Return the whole response; ``status`` is given for an unfinished response."""
        if status is not None:
            return {**self._head, "status": status, "output": [], "usage": None}
        cut = self.answer.finish == "length"
        status = "incomplete" if cut else "completed"
        has_text = self.answer.content or not self.answer.tool_calls
        output = [self.message(status, [self._part()])] if has_text else []
        asked, new = len(self._prompt), self.answer.tokens
        usage: dict[str, Any] = {"input_tokens": asked, "output_tokens": new, "total_tokens": asked + new}
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        return {**self._head, **details, "status": status, "output": [*output, *self.calls()], "usage": usage}

    async def events(self, pieces: AsyncIterator[Answer]) -> AsyncGenerator[str, None]:
        """Yield server-sent events as the pieces of the answer arrive."""
        number = 0

        def said(kind: str, **fields: Any) -> str:
            nonlocal number
            number += 1
            return f"event: {kind}\n" + event({"type": kind, "sequence_number": number - 1, **fields})

        where = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        yield said("response.created", response=self.body("in_progress"))
        yield said("response.in_progress", response=self.body("in_progress"))
        begun = False
        async for piece in pieces:
            self.answer.add(piece)
            if piece.content and not begun:
                begun = True
                yield said("response.output_item.added", output_index=0, item=self.message("in_progress", []))
                empty = {"type": "output_text", "text": "", "annotations": []}
                yield said("response.content_part.added", **where, part=empty)
            if piece.content:
                yield said("response.output_text.delta", **where, delta=piece.content, logprobs=[])
        body = self.body()
        if begun:
            yield said("response.output_text.done", **where, text=self.answer.content, logprobs=[])
            yield said("response.content_part.done", **where, part=self._part())
        for index, item in enumerate(body["output"]):
            if item["type"] == "function_call":
                yield said("response.output_item.added", output_index=index, item={**item, "arguments": ""})
                of_call = {"item_id": item["id"], "output_index": index}
                yield said("response.function_call_arguments.delta", **of_call, delta=item["arguments"])
                arguments = {"arguments": item["arguments"], "name": item["name"]}
                yield said("response.function_call_arguments.done", **of_call, **arguments)
            elif not begun:
                yield said("response.output_item.added", output_index=index, item=item)
            yield said("response.output_item.done", output_index=index, item=item)
        yield said(f"response.{body['status']}", response=body)
