"""More endpoints: OpenAI's responses, embeddings and transcripts, and vLLM's tokenization."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.responses import Response as HTTPResponse

from oslo_models.server.embeddings import EmbeddingRequest, entry
from oslo_models.server.errors import RequestError
from oslo_models.server.forms import read_form
from oslo_models.server.rendering import json_response
from oslo_models.server.responses import Response, ResponsesRequest
from oslo_models.server.service import Service, with_errors
from oslo_models.server.tokens import DetokenizeRequest, TokenizeRequest
from oslo_models.server.transcripts import TranscriptionRequest


class Endpoints:
    """Endpoints that use the models and the places of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def responses(self, request: ResponsesRequest) -> HTTPResponse:
        """Return the response, or stream its events. Only errors before the first event can set the response status."""
        pieces = self._response(request)
        if request.stream:
            first = await anext(pieces)
            return StreamingResponse(with_errors(first, pieces), media_type="text/event-stream")
        async with contextlib.aclosing(pieces):
            body = [each async for each in pieces][-1]
        return JSONResponse(body)

    async def _response(self, request: ResponsesRequest) -> AsyncGenerator[Any, None]:
        """Yield the events of a stream; without a stream, yield the body only."""
        chat = request.chat()
        served = self._service.find(request.model, "generate")
        assert served.generator is not None
        with self._service.admitted(1):
            (prompt,), (job,) = await served.jobs(chat)
            response = Response(request, served.name, prompt)
            if not request.stream:
                response.answer = await served.generator.answer(job)
                yield response.body()
                return
            async with contextlib.aclosing(served.generator.stream(job)) as pieces:
                async for each in response.events(pieces):
                    yield each

    async def embeddings(self, request: EmbeddingRequest) -> HTTPResponse:
        served = self._service.find(request.model, "embed")
        assert served.embedder is not None
        width = getattr(served.model.config, "hidden_size", None)
        if request.dimensions not in (None, width):
            message = f"dimensions={request.dimensions} is not supported; the vectors have {width}"
            raise RequestError(400, message, None, "dimensions")
        if len(request.texts) > 2048:
            raise RequestError(400, f"{len(request.texts)} inputs are more than 2048", None, "input")
        with self._service.admitted(1):
            served.check_texts(request.texts, "input")
            inputs = await served.in_tokenizer(request.encode, served.tokenizer, served.embedder.config)
            for ids in inputs:
                served.check_tokens(ids, "input")
                served.check_length(ids, "input")
            vectors = await served.embedder.embed(inputs)
        count = sum(map(len, inputs))
        usage = {"prompt_tokens": count, "total_tokens": count}

        def body() -> dict[str, Any]:
            rows = [entry(index, vector, request.encoding_format) for index, vector in enumerate(vectors)]
            return {"object": "list", "data": rows, "model": served.name, "usage": usage}

        return await json_response(body, sum(map(len, vectors)))

    async def transcriptions(self, request: Request) -> HTTPResponse:
        return await self._transcript(request, "transcribe")

    async def translations(self, request: Request) -> HTTPResponse:
        return await self._transcript(request, "translate")

    async def _transcript(self, request: Request, task: str) -> HTTPResponse:
        fields = read_form(request.headers.get("content-type", ""), await request.body())
        asked, file = TranscriptionRequest.of_form(fields)
        served = self._service.find(asked.model, "transcribe")
        assert served.transcriber is not None
        with self._service.admitted(1):
            transcript = await served.transcriber.transcribe(file, asked, task)
        return transcript.response(asked, task)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        served = self._service.find(request.model, None)
        with self._service.admitted(1):
            served.check_texts(request.texts)
            ids = await served.in_tokenizer(request.encode, served.tokenizer)
        texts = served.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": served.length, "tokens": ids, "token_strs": texts}

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, str]:
        served = self._service.find(request.model, None)
        with self._service.admitted(1):
            served.check_texts([request.tokens], "tokens")
            if request.tokens:
                served.check_tokens(request.tokens, "tokens")
            return {"prompt": await served.in_tokenizer(served.tokenizer.decode, request.tokens)}
