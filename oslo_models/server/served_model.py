"""One model of the server, with its tokenizer and its limits for requests."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oslo_models.deploy.decoding import Decoding
from oslo_models.server.adapter_turns import AdapterTurns
from oslo_models.server.embedding_config import EmbeddingConfig, read_embedding_config
from oslo_models.server.embeddings import Embedder
from oslo_models.server.errors import RequestError
from oslo_models.server.generation import AnswerGenerator
from oslo_models.server.generation_defaults import GenerationDefaults
from oslo_models.server.guard import TENANT
from oslo_models.server.images import ImageLimits
from oslo_models.server.media_chats import MediaChats, takes_media
from oslo_models.server.metrics import Metrics
from oslo_models.server.schema import ChatRequest, CompletionRequest, Generation
from oslo_models.server.sounds import SoundLimits
from oslo_models.server.text import StopAutomaton, prompt_context
from oslo_models.server.token_reader import GenerationJob
from oslo_models.server.transcriber import Transcriber, transcribes

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment

UNKNOWN_LENGTH = 2048
"""Default limit of prompt and answer tokens, for models without a limit in their configuration."""
TOKENIZER_THREADS = 2
MOST_SCORES = 1 << 18
"""Limit of log-probabilities in an answer. With more, Python's garbage collector would delay all threads."""
BATCH_ONLY = (
    "this request cannot join the running batch, and this server computes no other requests (--batch-only): use "
    "num_beams=1, and no more tokens in the prompt and the answer than --max-batch-length"
)
HEALTH_SECONDS = 2.0
TASKS = {"generate": "generates text", "embed": "makes embeddings", "transcribe": "transcribes sounds"}
"""The tasks of models, with verbs for messages."""


def _turns(model: Deployment) -> AdapterTurns | None:
    """Return the turns of a model's adapters; ``None`` if the rows of a step can have different adapters."""
    if model.reason_against_adapter_names() is not None:
        return AdapterTurns(model)
    model.disable_adapters()  # for requests of the base model; the others name their adapters
    return None


class ServedModel:
    """A deployed model that answers requests.

    Args:
        length: limit of tokens in a prompt and its answer together (default: the limit of the model).
        places: limit of concurrent answers.
        pooling, normalizes: settings of an embedding model; see `Embedder`.
        adapters: the loaded adapters: maps the names for clients to the names in the model.
        batch_only: refuse requests that cannot join the running batch.
        image_limits, sound_limits: limits of the images and sounds in a request, if ``tokenizer`` is the processor of a
            model that takes them.

    Attributes:
        task: what the model does, one of `TASKS`.
        media: prepares the images and sounds of chats; ``None`` for a model without them.
        transcriber: transcribes sounds; ``None`` for a model of another task.
        adapter: the model's name for the adapter in use; ``None`` without an adapter.
        parent: for an adapter, the name of the base model.
        adapted: one entry per adapter of this model, with the same threads and workers.

    Raises:
        ValueError: an embedding model has adapters, or the model's generation_config asks for something that the
            server does not support.
    """

    adapter: str | None = None
    parent: str | None = None

    def __init__(
        self,
        model: Deployment,
        tokenizer: Any,
        name: str,
        length: int | None,
        places: int,
        metrics: Metrics,
        pooling: str | None = None,
        normalizes: bool = True,
        adapters: Mapping[str, str] | None = None,
        batch_only: bool = False,
        image_limits: ImageLimits = ImageLimits(),  # noqa: B008  immutable
        sound_limits: SoundLimits = SoundLimits(),  # noqa: B008  immutable
    ) -> None:
        self.media = self.transcriber = None
        self.task = "generate" if model.can_generate() else "embed"
        if transcribes(tokenizer, model.config):
            self.task = "transcribe"
            self.transcriber = Transcriber(model, tokenizer, sound_limits, metrics)
            tokenizer = tokenizer.tokenizer
        elif takes_media(tokenizer, model.config):
            self.media = MediaChats(tokenizer, model.config, image_limits, sound_limits)
            tokenizer = tokenizer.tokenizer
        generates = self.task == "generate"
        self._batch_only = batch_only and generates
        self.model, self.tokenizer, self.name, self.places = model, tokenizer, name, places
        own = getattr(model.config.get_text_config(), "max_position_embeddings", None) or length or UNKNOWN_LENGTH
        self.length = min(own, length or own)
        self.created = int(time.time())
        if self.task == "embed":  # in some models, positions start after the padding token; the tokenizer has the limit
            self.length = min(self.length, tokenizer.model_max_length)
        if adapters and not generates:
            raise ValueError(f"adapters are for models that generate text; {name} {TASKS[self.task]}")
        self._defaults = GenerationDefaults(model.generation_config if generates else None)
        turns = _turns(model) if adapters else None
        self.generator = AnswerGenerator(model, tokenizer, places, metrics, turns) if generates else None
        self.embedder = self._embedder(pooling, normalizes) if self.task == "embed" else None
        # Separate threads: the server reports health while it tokenizes texts and while the model computes.
        self._tokenizing = ThreadPoolExecutor(TOKENIZER_THREADS, "oslo-tokenize")
        self._compiling = ThreadPoolExecutor(1, "oslo-grammar")  # a slow grammar must not delay other requests
        self._asking = ThreadPoolExecutor(1, "oslo-health")
        self._health: asyncio.Future[dict[str, Any]] | None = None
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._characters = self.length * longest
        """Maximum number of characters in a text of ``length`` tokens."""
        self.adapted = [self._with_adapter(*each) for each in (adapters or {}).items()]

    def _embedder(self, pooling: str | None, normalizes: bool) -> Embedder:
        config = read_embedding_config(self.model.config.name_or_path, pooling) or EmbeddingConfig(pooling or "mean")
        self.length = min(self.length, config.max_length or self.length)
        return Embedder(self.model, self.tokenizer, config, normalizes)

    def _with_adapter(self, name: str, adapter: str) -> ServedModel:
        adapted = copy.copy(self)
        adapted.name, adapted.parent, adapted.adapter = name, self.name, adapter
        return adapted

    async def health(self) -> dict[str, Any]:
        """Return the state of the workers. Concurrent requests share one query."""
        if self._health is None or self._health.done():
            ask = partial(self.model.health, HEALTH_SECONDS)
            self._health = asyncio.get_running_loop().run_in_executor(self._asking, ask)
        return await asyncio.shield(self._health)

    async def in_tokenizer(self, function: Any, *args: Any) -> Any:
        """Call a function that uses the tokenizer, in the tokenizer threads."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, partial(function, *args))

    def check_texts(self, prompts: list[Any], param: str = "prompt") -> None:
        """Raise ``RequestError`` for prompts that are too long, by their lengths alone."""
        for prompt in prompts:
            if isinstance(prompt, str) and len(prompt) > self._characters:
                raise RequestError(
                    400,
                    f"a prompt of {len(prompt)} characters has more than the {self.length} tokens that can be held",
                    "context_length_exceeded",
                    param,
                )
            if not isinstance(prompt, str) and len(prompt) > self.length:
                raise self._too_long(len(prompt), 0, param)

    def _too_long(self, asked: int, new: int, param: str = "prompt") -> RequestError:
        message = f"{asked} tokens and {new} to come are more than the {self.length} that can be held"
        return RequestError(400, message, "context_length_exceeded", param)

    def check_length(self, ids: list[int], param: str) -> None:
        """Raise ``RequestError`` for more tokens than the model accepts."""
        if len(ids) > self.length:
            raise self._too_long(len(ids), 0, param)

    def check_tokens(self, ids: list[int], param: str = "prompt") -> None:
        """Raise ``RequestError`` for an empty list of tokens, or one with tokens outside the vocabulary."""
        most = self.model.config.get_text_config().vocab_size - 1
        unknown = next((token for token in ids if not 0 <= token <= most), None)
        if unknown is not None:
            message = f"{param} has the token {unknown}, which the model does not know: its tokens are 0 to {most}"
            raise RequestError(400, message, None, param)
        if not ids:
            raise RequestError(400, f"{param} is empty: it has no tokens", None, param)

    async def jobs(self, request: CompletionRequest | ChatRequest) -> tuple[list[list[int]], list[GenerationJob]]:
        """Return the prompts as tokens, and one generation job per choice.

        Raises:
            RequestError: a prompt is empty, too long, or has tokens outside the vocabulary.
            ValueError: a field cannot be used with this model.
        """
        self.check_texts(request.prompts, request.param)
        media: dict[str, Any] = {}
        if self.media is not None and isinstance(request, ChatRequest):
            encode = partial(request.encode_with_media, self.media)
            ids, media = await asyncio.get_running_loop().run_in_executor(self.media.threads, encode)
            prompts = [ids]
        else:
            prompts = await self.in_tokenizer(request.encode, self.tokenizer)
        decoding = await asyncio.get_running_loop().run_in_executor(self._compiling, self._decoding, request)
        jobs = await self.in_tokenizer(self._jobs, request, prompts, decoding, media)
        for job in jobs:
            job.tenant = TENANT.get()
        return prompts, jobs

    def _jobs(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        decoding: Decoding | None,
        media: dict[str, Any],
    ) -> list[GenerationJob]:
        assert self.generator is not None
        for name in ("stop_token_ids", "logit_bias"):
            if tokens := list(getattr(request, name)):
                self.check_tokens(tokens, name)
        settings = self._defaults.settings(request)
        if decoding is not None and decoding.grammar is not None:  # the grammar may end the text earlier
            settings.pop("min_new_tokens", None)
        asked = request.logprobs_asked
        texts = [*request.stops, *self._defaults.stops]
        stops = StopAutomaton(texts) if texts else None
        jobs = []
        for index, ids in enumerate(prompts):
            self.check_tokens(ids, request.param)
            room = self.length - (0 if self.model.config.is_encoder_decoder else len(ids))
            new_tokens = request.max_new_tokens(max(room, 1), self._defaults.max_new_tokens)
            if len(ids) > self.length or new_tokens > room:
                raise self._too_long(len(ids), new_tokens, request.param)
            if (request.min_tokens or 0) > new_tokens:
                message = f"min_tokens={request.min_tokens} is more than the {new_tokens} tokens that may come"
                raise RequestError(400, message, None, "min_tokens")
            continues = request.continues_prompt and not self.model.config.is_encoder_decoder
            context = prompt_context(self.tokenizer, ids, request.skip_special_tokens) if continues else []
            for choice in range(request.n):
                seed = None if request.seed is None else (request.seed + index * request.n + choice) % 2**32
                job = GenerationJob(ids, new_tokens, settings, seed, stops, request.stop_token_ids, decoding)
                job.adapter, job.media = self.adapter, media
                job.skip_special_tokens, job.context = request.skip_special_tokens, context
                if isinstance(request, ChatRequest):
                    job.chat = request.tool_choice != "none" or not request.tools
                    job.forced_tool = request.forced_tool is not None
                    job.single_tool = not request.parallel_tool_calls
                if self._batch_only and not self.generator.can_join(job):
                    raise RequestError(400, BATCH_ONLY)
                jobs.append(job)
        scores = 0 if asked is None or request.stream else sum(job.max_new_tokens for job in jobs) * (1 + asked)
        if scores > MOST_SCORES:
            message = f"{scores} log-probabilities at once are more than {MOST_SCORES}; use stream=true or fewer tokens"
            raise RequestError(400, message, None, "logprobs")
        return jobs

    def _decoding(self, request: Generation) -> Decoding | None:
        assert self.generator is not None
        grammar = None if request.grammar is None else self.generator.compiled(request.grammar)
        if grammar is not None:
            grammar = replace(grammar, least=request.min_tokens or 0)
        decoding = Decoding(request.frequency_penalty, request.presence_penalty, grammar, request.logprobs_asked)
        return None if decoding == Decoding() else decoding
