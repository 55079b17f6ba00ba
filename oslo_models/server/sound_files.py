"""Reads the files of sounds that clients send: WAV here, FLAC and MP3 with the package ``soundfile``.

Clients are not trusted. The rate, the channels and the length are read from headers, and each length has to agree with
the bytes that are there. So a sound can be refused before any sample is decoded.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

FORMATS = ("wav", "flac", "mp3")
RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
"""Accepted sampling rates. The filters between them and the rates of models are small, see `resampling`."""
MOST_CHANNELS = 8
LEAST_SECONDS = 0.1
"""Shorter sounds have less than a window of some encoders."""
LOUDEST = 8.0
"""Limit of samples in files of floating-point numbers, whose full scale is 1. Larger ones overflow in spectrograms."""
_MOST_CHUNKS = 64
"""Limit of the chunks of a WAV file."""
_BLOCK = 1 << 18
"""Frames that are decoded at once."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_GUID = bytes.fromhex("000000001000800000aa00389b71")
"""The end of the identifier of a format in an extensible WAV header, whose first two bytes are the format."""
_DTYPES: dict[tuple[int, int], tuple[str, float]] = {
    (_PCM, 8): ("u1", 2.0**7),
    (_PCM, 16): ("<i2", 2.0**15),
    (_PCM, 24): ("u1", 2.0**31),
    (_PCM, 32): ("<i4", 2.0**31),
    (_FLOAT, 32): ("<f4", 1.0),
    (_FLOAT, 64): ("<f8", 1.0),
}
"""The format and bits of samples in a WAV file: their dtype and their full scale."""
_BITRATES = {
    1: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""kbit/s of layer III, by version of MPEG. Source: ISO 11172-3 and 13818-3."""
_MP3_RATES = (44100, 48000, 32000)
_TRIMMED = 2 * 4095 + 4 * 1152
"""Limit of frames that a decoder of MP3 leaves out: delay and padding of the encoder, and frames of headers."""
_TAGS = (b"TAG", b"APETAGEX", b"ID3", b"LYRICSBEGIN", b"3DI")
"""Beginnings of what may follow the frames of an MP3 file."""
_SOUNDFILE = 'this server reads only WAV, as it lacks the package for FLAC and MP3: pip install "oslo-models[audio]"'


@dataclass(frozen=True)
class SoundFile:
    """A sound whose header has been read.

    Attributes:
        frames: the number of samples of a channel.
    """

    rate: int
    channels: int
    frames: int
    _decode: Callable[[], Any]

    @property
    def seconds(self) -> float:
        return self.frames / self.rate

    def decode(self) -> Tensor:
        """Return the samples, float32 [frames]: the mean of all channels.

        Raises:
            ValueError: the samples are damaged, or are no numbers of a sound.
        """
        samples = torch.from_numpy(self._decode())
        if not bool(samples.abs().amax() <= LOUDEST):  # false for NaN
            raise ValueError(f"has samples that are no numbers, or beyond {LOUDEST:g} times full scale")
        return samples


def open_sound(data: bytes, kind: str | None = None, most: float = math.inf) -> SoundFile:
    """Read the header of a sound.

    Args:
        kind: one of `FORMATS`; ``None`` for the format that the first bytes tell.
        most: seconds after which no further frames are counted. The result is longer than that.

    Raises:
        ValueError: the format is unknown, or the header is damaged, lies about the length, or exceeds a limit. The
            message quotes nothing of the file.
    """
    found = _format_of(data)
    if kind is not None and kind not in FORMATS:
        raise ValueError(f"has a format other than {', '.join(FORMATS)}")
    if found is None or kind not in (None, found):
        raise ValueError(f"is no {'WAV, FLAC or MP3' if kind is None else kind.upper()} file")
    try:
        sound = _open_mp3(data, most) if found == "mp3" else _open_flac(data) if found == "flac" else _open_wav(data)
    except (struct.error, IndexError):
        raise ValueError("ends inside its header") from None
    if sound.rate not in RATES:
        raise ValueError(f"has a sampling rate of {sound.rate}, none of {', '.join(map(str, RATES))}")
    if not 1 <= sound.channels <= MOST_CHANNELS:
        raise ValueError(f"has {sound.channels} channels: 1 to {MOST_CHANNELS} are accepted")
    if sound.seconds < LEAST_SECONDS:
        raise ValueError(f"has {sound.seconds:g} s of sound, less than {LEAST_SECONDS:g}")
    return sound


def _format_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[:4] == b"fLaC":
        return "flac"
    return "mp3" if data[:3] == b"ID3" or _frame_header(data, 0) is not None else None


# WAV ------------------------------------------------------------------------------------------------------------------


def _open_wav(data: bytes) -> SoundFile:
    """Read the header of a WAV file. Source: Microsoft's Multimedia Programming Interface, and RFC 2361."""
    (size,) = struct.unpack_from("<I", data, 4)
    if size > len(data) - 8:
        raise ValueError(f"promises {size} bytes in its header, and has {len(data) - 8}")
    start, layout = 12, None
    for _ in range(_MOST_CHUNKS):
        name, length = struct.unpack_from("<4sI", data, start)
        start += 8
        if length > len(data) - start:
            raise ValueError(f"promises {length} bytes in a chunk, and has {len(data) - start}")
        if name == b"fmt ":
            layout = _wav_layout(data[start : start + min(length, 40)])
        elif name == b"data":
            if layout is None:
                raise ValueError("has samples before their format")
            return _wav_samples(data, start, length, *layout)
        start += length + length % 2
    raise ValueError(f"has no samples in its first {_MOST_CHUNKS} chunks")


def _wav_layout(header: bytes) -> tuple[int, int, int, int]:
    """Return the rate, the channels, the format and the bits of samples."""
    kind, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", header)
    if kind == _EXTENSIBLE:
        if len(header) < 40 or header[26:40] != _GUID:
            raise ValueError("has an unknown format of samples")
        (kind,) = struct.unpack_from("<H", header, 24)
    if (kind, bits) not in _DTYPES:
        raise ValueError(
            f"has samples of format {kind} with {bits} bits: PCM of 8, 16, 24 and 32 bits, and floating-point numbers "
            "of 32 and 64 bits are accepted"
        )
    if block != channels * bits // 8:
        raise ValueError(f"has {block} bytes a frame, and {channels} channels of {bits} bits")
    return rate, channels, kind, bits


def _wav_samples(data: bytes, start: int, length: int, rate: int, channels: int, kind: int, bits: int) -> SoundFile:
    width = channels * bits // 8
    if width == 0 or length % width:
        raise ValueError(f"has {length} bytes of samples, which are no whole frames of {width}")

    def decode() -> Any:
        frames, mono = length // width, numpy.empty(length // width, numpy.float32)
        for first in range(0, frames, _BLOCK):
            count = min(_BLOCK, frames - first)
            raw = numpy.frombuffer(data, numpy.uint8, count * width, start + first * width)
            mono[first : first + count] = _numbers(raw, kind, bits).reshape(count, channels).mean(1)
        return mono

    return SoundFile(rate, channels, length // width, decode)


def _numbers(raw: Any, kind: int, bits: int) -> Any:
    """Return samples as float64, with 1 for full scale."""
    dtype, scale = _DTYPES[kind, bits]
    if bits == 24:  # in the upper bytes of 32
        wide = numpy.zeros((len(raw) // 3, 4), numpy.uint8)
        wide[:, 1:] = raw.reshape(-1, 3)
        return wide.view("<i4")[:, 0] / scale
    numbers = raw.view(dtype).astype(numpy.float64)
    return (numbers - 128 if bits == 8 else numbers) / scale


# FLAC and MP3 ---------------------------------------------------------------------------------------------------------


def _open_flac(data: bytes) -> SoundFile:
    """Read the header of a FLAC file. Source: RFC 9639, section 8.2."""
    if data[4] & 0x7F != 0 or data[5:8] != b"\0\0\x22" or len(data) < 42:
        raise ValueError("has no header of FLAC")
    packed = int.from_bytes(data[18:26], "big")  # 20 bits, 3, 5 and 36
    rate, channels, frames = packed >> 44, (packed >> 41 & 7) + 1, packed & (1 << 36) - 1
    if frames == 0:
        raise ValueError("does not tell its length in its header")
    return SoundFile(rate, channels, frames, lambda: _decoded(data, "FLAC", frames, 0))


def _open_mp3(data: bytes, most: float) -> SoundFile:
    """Count the frames of an MP3 file by their headers."""
    start = 0
    if data[:3] == b"ID3":
        sizes = data[6:10]
        if len(sizes) < 4 or max(sizes) > 127:
            raise ValueError("has a damaged ID3 tag")
        start = 10 + sum(size << 7 * place for place, size in enumerate(reversed(sizes)))
    first = _frame_header(data, start)
    if first is None:
        raise ValueError("has no frames of MP3 after its tag")
    rate, channels, samples, _ = first
    place, count = start, 0
    while (header := _frame_header(data, place)) is not None and count * samples <= most * rate:
        if header[:3] != first[:3]:
            raise ValueError("changes its sampling rate or its channels")
        place += header[3]
        count += 1
    rest = data[place:]
    if header is None and (place > len(data) or (rest.strip(b"\0") and not rest.startswith(_TAGS))):
        raise ValueError("is damaged, or ends inside a frame")
    frames = count * samples
    return SoundFile(rate, channels, frames, lambda: _decoded(data[start:], "MP3", frames, _TRIMMED))


def _frame_header(data: bytes, place: int) -> tuple[int, int, int, int] | None:
    """Return the rate, the channels, the samples and the bytes of a frame of layer III; ``None`` without a frame."""
    header = data[place : place + 4]
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    version, layer = header[1] >> 3 & 3, header[1] >> 1 & 3
    bits, rate = header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or layer != 1 or bits in (0, 15) or rate == 3:
        return None
    halved = {3: 0, 2: 1, 0: 2}[version]  # MPEG 1, 2 and 2.5
    hertz, kilobits = _MP3_RATES[rate] >> halved, _BITRATES[min(halved, 1) + 1][bits]
    samples = 1152 if halved == 0 else 576
    return (
        hertz,
        1 if header[3] >> 6 == 3 else 2,
        samples,
        samples // 8 * 1000 * kilobits // hertz + (header[2] >> 1 & 1),
    )


def _decoded(data: bytes, kind: str, frames: int, less: int) -> Any:
    """Decode FLAC or MP3 in blocks.

    Args:
        frames: the frames that headers promise. No more are decoded.
        less: how many may be missing.
    """
    try:
        import soundfile
    except (ImportError, OSError):  # without its library, the package raises OSError
        raise ValueError(_SOUNDFILE) from None
    mono, count = numpy.empty(frames, numpy.float32), 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if file.format not in (kind, "MPEG") or file.channels > MOST_CHANNELS:
                raise ValueError
            while count < frames and len(block := file.read(min(_BLOCK, frames - count), "float32", always_2d=True)):
                mono[count : count + len(block)] = block.mean(1)
                count += len(block)
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, MemoryError):
        raise ValueError(f"is a damaged {kind} file") from None
    if count == 0 or count < frames - less:
        raise ValueError(f"promises {frames} samples in its headers, and has {count}")
    return mono[:count]
