"""Transcribes sounds with one deployed model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from oslo_models.deploy.cancellation import Cancellation
from oslo_models.server.errors import RequestError
from oslo_models.server.media_chats import DECODERS, plain_text
from oslo_models.server.metrics import Metrics
from oslo_models.server.sound_files import SoundFile
from oslo_models.server.sounds import SoundLimits, SoundReader, has_ears, rate_of
from oslo_models.server.transcripts import Segment, Transcript, TranscriptionRequest

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment

WHISPER = ("whisper",)
"""Types that read sounds in windows, with a prompt, a language and times."""
DECODED = ("moonshine", "speech_to_text")
"""Types of an encoder that reads the whole sound, and a decoder."""
CTC = (
    *("data2vec-audio", "hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer"),
    "wavlm",
)
"""Types of an encoder that reads the whole sound, with a head that classifies its frames."""
TRANSCRIBING = (*WHISPER, *DECODED, *CTC)
WHOLE_SECONDS = 60.0
"""Limit of a sound for types that read the whole sound: the memory of their attention grows with its square."""
TASKS = ("transcribe", "translate")


def transcribes(processor: Any, config: Any) -> bool:
    """Return whether a model transcribes: it is of a type in `TRANSCRIBING`, and this is its processor."""
    return config.model_type in TRANSCRIBING and has_ears(processor)


class Transcriber:
    """Transcribes sounds in separate threads.

    There is a thread for each row of the running batch, so that several sounds share its steps. A sound is decoded when
    its turn has come, since a long one takes much more memory than its file, and `DECODERS` sounds at once.

    Args:
        model: a deployed model.
        processor: the model's processor, from transformers.
    """

    def __init__(self, model: Deployment, processor: Any, limits: SoundLimits, metrics: Metrics) -> None:
        self._model, self._processor, self._metrics = model, processor, metrics
        self._type, self._rate = model.config.model_type, rate_of(processor)
        whole = None if self._type in WHISPER else WHOLE_SECONDS
        self._reader = SoundReader(self._rate, limits, whole)
        self._dtype = model.config.dtype or torch.get_default_dtype()
        self._opening = ThreadPoolExecutor(1, "oslo-headers")  # an MP3 has a header in each of its frames
        self._threads = ThreadPoolExecutor(max(DECODERS, getattr(model, "batch_rows", 1)), "oslo-transcribe")
        self._decoders = threading.BoundedSemaphore(DECODERS)
        self._languages = _Languages(model.generation_config) if self._type in WHISPER else None

    async def transcribe(self, file: bytes, request: TranscriptionRequest, task: str) -> Transcript:
        """Return the transcript of a file. Cancelling the task cancels the call.

        Args:
            task: one of `TASKS`.

        Raises:
            RequestError: the file is no sound, or the model does not do what the request asks for.
        """
        options = self._options(request, task)
        loop, cancellation = asyncio.get_running_loop(), Cancellation()
        sound = await loop.run_in_executor(self._opening, self._reader.open, file, None, "file", "file")
        try:
            call = partial(self._call, sound, options, request, cancellation)
            return await loop.run_in_executor(self._threads, call)
        except asyncio.CancelledError:
            self._metrics.count("cancelled_calls_total")
            raise
        finally:
            cancellation.cancel()

    def _options(self, request: TranscriptionRequest, task: str) -> dict[str, Any]:
        """Return the arguments of `generate`, except those with the sound."""
        options: dict[str, Any] = {"temperature": request.temperature} if request.temperature else {}
        if self._languages is not None:
            options = {"temperature": request.temperature, "return_dict_in_generate": False}
            options |= self._languages.options(request.language, task)
            if request.timed:
                self._languages.require_times(f"response_format={request.response_format}", "response_format")
                options |= {"return_timestamps": True, "return_segments": True}
            if request.prompt and request.prompt.strip():
                options["prompt_ids"] = self._prompt(request.prompt)
            return options
        if request.timed:
            raise _refused(f"response_format={request.response_format}", self._type, "response_format")
        for name in ("language", "prompt"):
            if getattr(request, name) is not None:
                raise _refused(name, self._type, name)
        if task != "transcribe":
            raise _refused("translation", self._type, "model")
        if self._type in CTC and request.temperature:
            raise _refused("temperature", self._type, "temperature")
        return options | {"do_sample": bool(request.temperature), **self._length()}

    def _length(self) -> dict[str, int]:
        """Return the limit of new tokens if the checkpoint has none. Otherwise `generate` would stop after 20."""
        settings, config = self._model.generation_config, self._model.config
        if any(getattr(settings, name, None) is not None for name in ("max_length", "max_new_tokens")):
            return {}
        positions = getattr(config, "max_target_positions", None) or config.max_position_embeddings
        return {"max_new_tokens": positions - 1}

    def _prompt(self, text: str) -> torch.Tensor:
        """Return the tokens of a prompt. Special tokens and times in the text are text."""
        tokenizer = self._processor.tokenizer
        special = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
        ids = self._processor.get_prompt_ids(plain_text(text, special), return_tensors="pt")
        most = self._model.config.max_target_positions // 2 - 1
        if len(ids) > most:
            raise RequestError(400, f"the prompt has {len(ids)} tokens, more than {most}", None, "prompt")
        return ids

    def _inputs(self, sound: SoundFile) -> dict[str, Any]:
        """Return the arguments of a call with a sound."""
        samples = self._reader.decode(sound, "file", "file")
        options: dict[str, Any] = {"sampling_rate": self._rate, "return_tensors": "pt"}
        if self._languages is not None and len(samples) > self._processor.feature_extractor.n_samples:
            limit = self._processor.feature_extractor.chunk_length
            self._languages.require_times(f"a sound of {sound.seconds:g} s, longer than {limit} s,", "file")
            options |= {"truncation": False, "padding": "longest", "return_attention_mask": True}
        found = self._processor(audio=samples, **options)
        inputs = {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in found.items()}
        if "truncation" in options:  # published checkpoints turn times off, with which windows are cut
            inputs["return_timestamps"] = True
        return inputs

    def _call(
        self,
        sound: SoundFile,
        options: dict[str, Any],
        request: TranscriptionRequest,
        cancellation: Cancellation,
    ) -> Transcript:
        """Compute a transcript in this thread."""
        with self._decoders:
            inputs = self._inputs(sound)
        if self._type in CTC:
            ids = self._model(**inputs).logits[0].argmax(-1).tolist()
            return Transcript(self._processor.tokenizer.decode(ids), sound.seconds)
        given: dict[str, Any] = {"seed": None, "cancellation": cancellation, "streamer": None}
        language = None
        if self._languages is not None and request.timed:
            language, options = self._with_language(inputs, options, given)
        made: Any = self._model.generate(**{**inputs, **options}, **given)
        segments = []
        if isinstance(made, Mapping):
            segments = [self._segment(each) for each in made["segments"][0]]
            made = made["sequences"]
        ids = made[0].tolist()
        self._metrics.count("generated_tokens_total", len(ids))
        return Transcript(self._text(ids).strip(), sound.seconds, segments, language)

    def _with_language(
        self, inputs: Mapping[str, Any], options: dict[str, Any], given: Mapping[str, Any]
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the language of a sound, and the options with it. Without one, a call detects it."""
        assert self._languages is not None
        if not self._languages.tokens:
            return "en", options
        if "language" not in options:
            features = inputs["input_features"][..., : 2 * self._model.config.max_source_positions]
            once: dict[str, Any] = {name: value for name, value in options.items() if name == "task"}
            once |= {"force_unique_generate_call": True, "return_dict_in_generate": False, "max_new_tokens": 1}
            found: Any = self._model.generate(input_features=features, **once, **given)  # with the first tokens
            token = next(token for token in found[0].tolist() if token in self._languages.codes)
            options = {**options, "language": self._languages.codes[token]}
        return options["language"].strip("<|>"), options

    def _segment(self, segment: Mapping[str, Any]) -> Segment:
        ids = segment["tokens"].tolist()
        return Segment(float(segment["start"]), float(segment["end"]), self._text(ids), ids)

    def _text(self, ids: list[int]) -> str:
        """Return the text of tokens, without tokens of times."""
        last = None if self._languages is None else self._languages.last
        kept = [token for token in ids if last is None or token <= last]
        return str(self._processor.tokenizer.decode(kept, skip_special_tokens=True))


class _Languages:
    """The languages of a Whisper, and whether it knows times.

    Args:
        config: the generation configuration of the model.

    Attributes:
        tokens: the token of each language; empty for a model of one language.
        codes: the text of these tokens.
        last: the last token that is no time; ``None`` for a model without times.
    """

    def __init__(self, config: Any) -> None:
        several = getattr(config, "is_multilingual", True)
        self.tokens: dict[str, int] = dict(getattr(config, "lang_to_id", None) or {}) if several else {}
        self.codes = {token: text for text, token in self.tokens.items()}
        self.tasks = (getattr(config, "task_to_id", None) or {}) if several else {}
        self.last: int | None = getattr(config, "no_timestamps_token_id", None)

    def options(self, language: str | None, task: str) -> dict[str, Any]:
        """Return the arguments of `generate` for a language and a task.

        Raises:
            RequestError: the model does not know one of them.
        """
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        options: dict[str, Any] = {}
        if self.tasks:
            options["task"] = task
        elif task != "transcribe":
            raise RequestError(400, "this model does not translate: it knows one language", None, "model")
        if language is None:
            return options
        code = TO_LANGUAGE_CODE.get(language.lower(), language.lower())
        if not self.tokens and code == "en":
            return options
        if (token := f"<|{code}|>") not in self.tokens:
            known = ", ".join(text.strip("<|>") for text in self.tokens) or "en"
            raise RequestError(
                400, f"this model does not know the language {language!r}; it knows {known}", None, "language"
            )
        return {**options, "language": token}

    def require_times(self, asked: str, param: str) -> None:
        """Raise ``RequestError`` for a model without tokens of times."""
        if self.last is None:
            message = f"{asked} needs times, and the model's generation_config has no no_timestamps_token_id"
            raise RequestError(400, message, None, param)


def _refused(what: str, model_type: str, param: str) -> RequestError:
    return RequestError(400, f"{what} is not supported for models of type {model_type}", None, param)
