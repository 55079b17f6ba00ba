"""The sounds of requests: their limits, and how the processors of models read them.

Clients are not trusted: no address is fetched and no file is opened. Sounds arrive in base64, or in a form. All headers
of a request are checked before a sample is decoded.
"""

from __future__ import annotations

import base64
import binascii
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oslo_models.server.errors import RequestError
from oslo_models.server.resampling import resample
from oslo_models.server.sound_files import FORMATS, SoundFile, open_sound

SOUND_PARTS = ("input_audio",)
"""Types of message parts with a sound."""


@dataclass(frozen=True)
class SoundLimits:
    """Limits of the sounds in a request.

    Attributes:
        sounds: number of sounds in a request.
        seconds: length of all sounds of a request together.
    """

    sounds: int = 4
    seconds: float = 1200.0


@dataclass(frozen=True)
class Hearing:
    """How the processor of a model type reads sounds.

    Attributes:
        one: it reads at most one sound of a chat.
        package: the further package that it needs.
    """

    one: bool = False
    package: str = ""


HEARING: Mapping[str, Hearing] = {
    "qwen2_audio": Hearing(),
    **dict.fromkeys(("audioflamingo3", "musicflamingo", "glmasr", "qwen3_asr"), Hearing(one=True)),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), Hearing(package="torchaudio")),
    "fun_asr_nano": Hearing(one=True, package="torchaudio"),
}
"""Model types whose chats take sounds."""


def missing_package(model_type: str) -> str:
    """Return the package that the processor of a type in `HEARING` needs and that is not installed, or ""."""
    package = HEARING[model_type].package
    return package if package and importlib.util.find_spec(package) is None else ""


def hears(processor: Any, config: Any) -> bool:
    """Return whether chats of a model take sounds: it is of a type in `HEARING`, and this is its processor."""
    return config.model_type in HEARING and has_ears(processor)


def has_ears(processor: Any) -> bool:
    """Return whether this is a processor of sounds with a tokenizer. Otherwise it is a tokenizer, or one of images."""
    return hasattr(processor, "tokenizer") and _extractor(processor) is not None


def _extractor(processor: Any) -> Any:
    return getattr(processor, "audio_processor", None) or getattr(processor, "feature_extractor", None)


def rate_of(processor: Any) -> int:
    """Return the sampling rate that a processor expects."""
    return int(_extractor(processor).sampling_rate)


def longest_sound(processor: Any, config: Any) -> float | None:
    """Return the seconds of a sound that a processor reads; it would leave out the rest. ``None`` for no limit."""
    window: float | None = getattr(_extractor(processor), "chunk_length", None)
    most: float | None = getattr(processor, "max_audio_len", None)
    if config.model_type == "qwen2_audio":
        return window
    return most if most is None or window is None else most // window * window  # whole windows


def sound_part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the sound in a message part of `SOUND_PARTS`, for `SoundReader`.

    Raises:
        ValueError: the part has none.
    """
    value = part.get("input_audio")
    if not isinstance(value, dict) or not isinstance(value.get("data"), str):
        raise ValueError(f"{place} has no input_audio with data in base64")
    if unknown := sorted(set(value) - {"data", "format"}):
        raise ValueError(f"{place}.input_audio has {unknown[0]:.64}, and this server reads data and format")
    if value.get("format") not in FORMATS:
        raise ValueError(f"{place}.input_audio.format is none of {', '.join(FORMATS)}")
    return {"sound": value["data"], "format": value["format"], "place": place}


class SoundReader:
    """Reads the sounds of requests for one model.

    Args:
        longest: limit of seconds for each sound, if the model has one; see `longest_sound`.
    """

    def __init__(self, rate: int, limits: SoundLimits, longest: float | None = None) -> None:
        self._rate, self._limits, self._longest = rate, limits, longest

    def open_parts(self, parts: Sequence[Mapping[str, Any]]) -> list[tuple[SoundFile, str]]:
        """Return the sounds of a chat with their places, by their headers.

        Args:
            parts: from `sound_part`.

        Raises:
            RequestError: a sound cannot be read, or there are too many or too long ones.
        """
        if len(parts) > self._limits.sounds:
            message = f"the request has {len(parts)} sounds, more than {self._limits.sounds}"
            raise RequestError(400, message, None, "messages")
        opened = []
        for part in parts:
            try:
                data = base64.b64decode(part["sound"], validate=True)
            except (binascii.Error, ValueError):
                raise RequestError(400, f"{part['place']} is not valid base64", None, "messages") from None
            opened.append((self.open(data, part["format"], part["place"], "messages"), part["place"]))
        seconds = sum(sound.seconds for sound, _ in opened)
        if seconds > self._limits.seconds:
            message = f"the request has {seconds:g} s of sound, more than {self._limits.seconds:g}"
            raise RequestError(400, message, None, "messages")
        return opened

    def open(self, data: bytes, kind: str | None, place: str, param: str) -> SoundFile:
        """Return a sound by its header.

        Raises:
            RequestError: it cannot be read, or is too long.
        """
        try:
            sound = open_sound(data, kind, self._limits.seconds)
        except ValueError as error:
            raise RequestError(400, f"{place} {error}", None, param) from None
        for most in (self._limits.seconds, self._longest):
            if most is not None and sound.seconds > most:
                owner = "this server" if most == self._limits.seconds else "this model"
                message = f"{place} has {sound.seconds:g} s of sound; {owner} reads at most {most:g} s"
                raise RequestError(400, message, None, param)
        return sound

    def decode(self, sound: SoundFile, place: str, param: str) -> Any:
        """Return the samples at the rate of the model, as a float32 array of numpy.

        Raises:
            RequestError: the samples are damaged.
        """
        try:
            return resample(sound.decode(), sound.rate, self._rate).numpy()
        except ValueError as error:
            raise RequestError(400, f"{place} {error}", None, param) from None
