"""Files of sounds: each accepted layout is read exactly, and nothing is decoded that a header did not promise."""

from __future__ import annotations

import io
import math
import struct
import time
import tracemalloc
from typing import Any

import numpy
import pytest
import torch

from oslo_models.server.resampling import BETA, ROLLOFF, ZEROS, resample
from oslo_models.server.sound_files import FORMATS, LOUDEST, MOST_CHANNELS, RATES, open_sound

from support.sounds import RATE, resampled, tone, wav, wav_of

# WAV ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extensible", [False, True])
@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_samples_of_wav_are_read_exactly(kind: int, bits: int, extensible: bool) -> None:
    for channels in (1, 2, MOST_CHANNELS):
        samples = tone(channels, 0.2, 44100, channels)
        if bits == 8:
            samples = numpy.round(samples * 128) / 128
        sound = open_sound(wav(samples, 44100, bits, kind, extensible), "wav")
        assert (sound.rate, sound.channels, sound.frames) == (44100, channels, len(samples))
        expected = samples.astype("f8").clip(-1, 127 / 128 if bits == 8 else 1).mean(1)
        assert numpy.abs(sound.decode().numpy() - expected).max() < 1e-7
        assert sound.decode().dtype == torch.float32


def test_wav_without_padding_of_its_last_chunk_is_read() -> None:
    sound = open_sound(wav_of(bytes(range(256)) * 8 + b"x", bits=8))
    assert sound.frames == 2049
    assert sound.decode()[:3].tolist() == [-1.0, -127 / 128, -126 / 128]


SAMPLES = tone(0, 0.2)
WAV = wav(SAMPLES)
PCM = WAV[-6400:]
MANY = 2**32 - 1
REFUSED = {
    "empty": (b"", "is no WAV file"),
    "text": (b"hello, this is no sound at all" * 9, "is no WAV file"),
    "big endian": (b"RIFX" + WAV[4:], "is no WAV file"),
    "header only": (WAV[:4] + b"\x04\0\0\0WAVE", "ends inside its header"),
    "half a format": (WAV[:12] + b"fmt \x08\0\0\0" + WAV[20:28], "promises .* bytes in its header"),
    "short format": (b"RIFF\x10\0\0\0WAVEfmt \x04\0\0\0abcd", "ends inside its header"),
    "cut in the samples": (WAV[:-100], "promises 6464 bytes in its header, and has 6364|promises .* and has"),
    "RIFF of 2^32 bytes": (wav_of(PCM, size=MANY), "promises 4294967295 bytes in its header"),
    "samples of 2^32 bytes": (wav_of(PCM, length=MANY), "promises 4294967295 bytes in a chunk, and has 6400"),
    "more samples than bytes": (wav_of(PCM, length=len(PCM) + 2), "promises 6402 bytes in a chunk"),
    "samples without end": (wav_of(PCM, length=0), "has 0 s of sound, less than 0.1"),
    "rate of 0": (wav_of(PCM, rate=0), "has a sampling rate of 0, none of 8000"),
    "rate of 2^32": (wav_of(PCM, rate=MANY), "has a sampling rate of 4294967295"),
    "rate with a large filter": (wav_of(PCM, rate=15_999), "has a sampling rate of 15999"),
    "no channels": (wav_of(PCM, channels=0), "no whole frames of 0"),
    "9 channels": (wav_of(PCM[: 18 * 300], channels=9), "has 9 channels: 1 to 8 are accepted"),
    "65535 channels": (wav_of(b"x" * 65535 * 2, channels=65535), "channels"),
    "65535 channels of 8 bits": (wav_of(b"x" * 65535 * 2, channels=65535, bits=8), "has 65535 channels"),
    "half a frame": (wav_of(PCM + b"x"), "6401 bytes of samples, which are no whole frames of 2"),
    "bytes of a frame": (wav_of(PCM, block=1), "has 1 bytes a frame, and 1 channels of 16 bits"),
    "12 bits": (wav_of(PCM, bits=12, block=2), "format 1 with 12 bits"),
    "0 bits": (wav_of(PCM, bits=0, block=0), "format 1 with 0 bits"),
    "A-law": (wav_of(PCM, bits=8, kind=6), "format 6 with 8 bits"),
    "ADPCM": (wav_of(PCM, kind=2), "format 2 with 16 bits"),
    "extensible without its end": (wav_of(PCM, kind=0xFFFE), "an unknown format of samples"),
    "too short": (wav(tone(0, 0.05)), "has 0.05 s of sound, less than 0.1"),
    "samples before their format": (WAV[:12] + b"data\x02\0\0\0ab" + WAV[12:], "promises|before their format"),
    "a flood of chunks": (
        b"RIFF" + struct.pack("<I", 8 * 2**20 + 4) + b"WAVE" + b"junk\0\0\0\0" * 2**20,
        "has no samples in its first 64 chunks",
    ),
}


@pytest.mark.parametrize(("data", "problem"), REFUSED.values(), ids=REFUSED)
def test_wav_that_lies_is_refused_by_its_header(data: bytes, problem: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=problem):
            open_sound(data, "wav")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_header_of_a_long_sound_allocates_nothing() -> None:
    data = wav_of(bytes(16 << 20))
    tracemalloc.start()
    try:
        assert open_sound(data).seconds == (8 << 20) / RATE
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 2 * LOUDEST])
def test_samples_that_are_no_numbers_of_a_sound_are_refused(value: float) -> None:
    samples = SAMPLES.copy()
    samples[1000] = value
    for bits in (32, 64):
        with pytest.raises(ValueError, match="samples that are no numbers, or beyond 8 times full scale"):
            open_sound(wav(samples, bits=bits, kind=3)).decode()


# FLAC and MP3 ---------------------------------------------------------------------------------------------------------


def encoded(kind: str, samples: Any, rate: int = RATE) -> bytes:
    soundfile = pytest.importorskip("soundfile", reason="FLAC and MP3 need soundfile")
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **({"subtype": "PCM_16"} if kind == "FLAC" else {}))
    return file.getvalue()


@pytest.mark.parametrize("channels", [1, 2])
def test_flac_is_read_exactly(channels: int) -> None:
    samples = tone(1, 0.7, 48000, channels)
    sound = open_sound(encoded("FLAC", samples, 48000), "flac")
    assert (sound.rate, sound.channels, sound.frames) == (48000, channels, len(samples))
    assert numpy.array_equal(sound.decode().numpy(), samples.mean(1))


def smooth(seconds: float, rate: int) -> Any:
    return (0.5 * numpy.sin(2 * math.pi * 440 * numpy.arange(round(seconds * rate)) / rate)).astype("f4")[:, None]


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 24000, 44100, 48000])  # of MPEG 2.5, 2 and 1
def test_mp3_is_read(rate: int) -> None:
    samples = smooth(1.3, rate)
    sound = open_sound(encoded("MP3", samples, rate), "mp3")
    assert (sound.rate, sound.channels) == (rate, 1)
    found = sound.decode().numpy()
    assert 0 <= sound.frames - len(found) < 5 * 1152
    best = min(numpy.abs(found[at : at + rate] - samples[:rate, 0]).max() for at in range(0, len(found) - rate))
    assert best < 0.1


def test_mp3_with_a_tag_before_and_behind_it_is_read() -> None:
    data = encoded("MP3", smooth(0.5, RATE))
    tag = b"ID3\x04\0\0\0\0\x01\x05" + b"x" * 133
    frames = open_sound(data).frames
    assert open_sound(tag + data + b"TAG" + b"y" * 125).frames == frames
    assert len(open_sound(tag + data + bytes(300), "mp3").decode()) > 0


def test_mp3_counts_the_frames_that_are_there() -> None:
    """A header of Xing may promise less, and constant bit rates need none."""
    data = encoded("MP3", smooth(2.0, RATE))
    sound = open_sound(data)
    assert 2.0 <= sound.seconds < 2.3
    tripled = open_sound(data + data + data)
    assert tripled.frames == 3 * sound.frames


def test_flood_of_mp3_frames_is_not_counted_to_its_end() -> None:
    frame = b"\xff\xe3\x18\xc4" + bytes(68)  # 72 ms in 72 bytes, of MPEG 2.5
    flood = frame * (1 << 18)
    began = time.monotonic()
    sound = open_sound(flood, "mp3", 60)
    assert 60 < sound.seconds < 60.2
    assert time.monotonic() - began < 0.5


def damage(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def flac_header(rate: int, channels: int, frames: int) -> bytes:
    """Return a FLAC file of a header and a kilobyte."""
    packed = rate << 44 | channels - 1 << 41 | 15 << 36 | frames
    return b"fLaC\x80\0\0\x22" + bytes(10) + packed.to_bytes(8, "big") + bytes(16 + 1000)


FLAC_REFUSED = {
    "no header": (b"fLaC" + bytes(100), "has no header of FLAC"),
    "header only": (flac_header(RATE, 1, 10**5)[:30], "has no header of FLAC"),
    "no length": (flac_header(RATE, 1, 0), "does not tell its length"),
    "rate of 0": (flac_header(0, 1, 10**5), "has a sampling rate of 0"),
    "rate of 655350": (flac_header(655350, 1, 10**6), "has a sampling rate of 655350"),
}


@pytest.mark.parametrize(("data", "problem"), FLAC_REFUSED.values(), ids=FLAC_REFUSED)
def test_flac_that_lies_is_refused_by_its_header(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        open_sound(data, "flac")


def test_length_of_a_flac_is_read_before_it_is_decoded() -> None:
    assert open_sound(flac_header(48000, 8, 2**36 - 1)).seconds > 1_400_000


def test_damaged_flac_is_refused() -> None:
    data = encoded("FLAC", tone(2, 0.5))
    for broken in (data[: len(data) // 2], data[:60], damage(data, 200, b"\xff" * 400), flac_header(RATE, 1, 10**5)):
        sound = open_sound(broken)
        with pytest.raises(ValueError, match=r"is a damaged FLAC file|promises .* samples in its headers, and has"):
            sound.decode()
    promised = int.from_bytes(data[18:26], "big")
    longer = damage(data, 18, (promised + 5000).to_bytes(8, "big"))
    with pytest.raises(ValueError, match=r"is a damaged FLAC file|promises 13000 samples in its headers"):
        open_sound(longer).decode()
    shorter = open_sound(damage(data, 18, (promised - 5000).to_bytes(8, "big")))
    try:
        assert len(shorter.decode()) == 3000
    except ValueError as error:
        assert "damaged" in str(error)


def test_bomb_of_silence_is_decoded_to_its_promised_length_only() -> None:
    data = encoded("FLAC", numpy.zeros((48000 * 60, 1), "f4"), 48000)
    assert len(data) < 100_000
    sound = open_sound(data)
    assert sound.seconds == 60
    short = open_sound(damage(data, 18, (int.from_bytes(data[18:26], "big") - 48000 * 59).to_bytes(8, "big")))
    try:
        assert len(short.decode()) <= 48000
    except ValueError as error:
        assert "damaged" in str(error)


def test_damaged_mp3_is_refused() -> None:
    data = encoded("MP3", smooth(1.0, RATE))
    with pytest.raises(ValueError, match="ends inside a frame"):
        open_sound(data[:-10])
    with pytest.raises(ValueError, match="damaged, or ends inside a frame"):
        open_sound(data + b"hello")
    with pytest.raises(ValueError, match="changes its sampling rate"):
        open_sound(data + encoded("MP3", smooth(1.0, 24000), 24000))
    with pytest.raises(ValueError, match="damaged ID3 tag"):
        open_sound(b"ID3\x04\0\0\xff\xff\xff\xff" + data)
    with pytest.raises(ValueError, match="no frames of MP3 after its tag"):
        open_sound(b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + data)


def test_tag_of_mp3_hides_no_other_format() -> None:
    hidden = b"ID3\x04\0\0\0\0\0\0" + encoded("FLAC", tone(0, 0.5))
    with pytest.raises(ValueError, match="no frames of MP3"):
        open_sound(hidden)


def test_frames_of_noise_are_refused_or_bounded() -> None:
    """Frame headers with random bits between them decode to no more than their headers promise."""
    pytest.importorskip("soundfile", reason="FLAC and MP3 need soundfile")
    generator = numpy.random.default_rng(0)
    frame = b"\xff\xf3\x88\xc0" + generator.integers(0, 256, 572, dtype="u1").tobytes()  # 64 kbit/s at 16 kHz
    sound = open_sound(frame[:288] * 200)
    assert sound.frames == 200 * 576
    try:
        assert len(sound.decode()) <= sound.frames
    except ValueError as error:
        assert "MP3" in str(error) or "promises" in str(error) or "samples that" in str(error)


def test_format_and_file_have_to_agree() -> None:
    for kind in ("flac", "mp3"):
        with pytest.raises(ValueError, match=f"is no {kind.upper()} file"):
            open_sound(WAV, kind)
    with pytest.raises(ValueError, match="is no WAV file"):
        open_sound(flac_header(RATE, 1, 10**5), "wav")
    for kind in ("ogg", "pcm16", "WAV", "../wav", ""):
        with pytest.raises(ValueError, match=f"has a format other than {', '.join(FORMATS)}"):
            open_sound(WAV, kind)
    for data in (b"OggS" + bytes(100), b"FORM\0\0\0\x10AIFF" + bytes(50), b"#!AMR\n" + bytes(50), b"\xff\xfb"):
        with pytest.raises(ValueError, match="is no WAV, FLAC or MP3 file"):
            open_sound(data)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "soundfile", None)
    with pytest.raises(ValueError, match=r'reads only WAV.*pip install "oslo-models\[audio\]"'):
        open_sound(flac_header(RATE, 1, 10**5)).decode()


# Resampling -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", RATES)
def test_resampling_is_a_windowed_sinc(rate: int) -> None:
    x = tone(rate, 0.1, rate)[:, 0].astype("f8")
    for wanted in (16000, 24000):
        found = resample(torch.from_numpy(x).float(), rate, wanted).numpy()
        expected = x if rate == wanted else resampled(x, rate, wanted)
        assert found.shape == expected.shape
        assert numpy.abs(found - expected).max() < 2e-6


def test_resampling_equals_torchaudio() -> None:
    functional = pytest.importorskip("torchaudio.functional", reason="torchaudio is not installed")
    x = torch.from_numpy(tone(3, 0.3, 44100)[:, 0])
    options = {
        "lowpass_filter_width": ZEROS,
        "rolloff": ROLLOFF,
        "resampling_method": "sinc_interp_kaiser",
        "beta": BETA,
    }
    assert torch.allclose(resample(x, 44100, 16000), functional.resample(x, 44100, 16000, **options), atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_tones_are_kept_or_removed(rate: int) -> None:
    """A tone below half of both rates keeps its shape; one above half of the new rate is silent."""
    seconds = numpy.arange(rate) / rate
    kept = resample(torch.from_numpy(numpy.sin(2 * math.pi * 1000 * seconds)).float(), rate, 16000).numpy()
    expected = numpy.sin(2 * math.pi * 1000 * numpy.arange(16000) / 16000)
    assert numpy.abs(kept - expected)[2000:-2000].max() < 1e-5
    if rate > 20_000:
        gone = resample(torch.from_numpy(numpy.sin(2 * math.pi * 9000 * seconds)).float(), rate, 16000).numpy()
        assert numpy.abs(gone)[2000:-2000].max() < 1e-5


def test_long_sounds_are_resampled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from oslo_models.server import resampling

    x = torch.from_numpy(tone(5, 0.9, 44100)[:, 0])
    whole = resample(x, 44100, 16000)
    monkeypatch.setattr(resampling, "_PRODUCTS", 20_000)
    assert torch.allclose(resample(x, 44100, 16000), whole, atol=1e-6)
