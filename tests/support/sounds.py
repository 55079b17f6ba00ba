"""Sounds, files of sounds, and processors of tiny models that read them."""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedTokenizerFast

from oslo_models.server.resampling import BETA, ROLLOFF, ZEROS

from support import zoo
from support.http_server import LocalModel
from support.reference import reference_model

RATE = 16_000
WINDOW = 2
"""Seconds in the window of the tiny models."""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% for part in m.content %}"
    "{{ '<sound>' if part.type == 'audio' else part.text }} {% endfor %}{% endfor %}"
)


class Recording(LocalModel):
    """A local model that keeps the arguments of `generate`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.calls: list[dict[str, Any]] = []

    def generate(self, *args: Any, **options: Any) -> Any:
        self.calls.append(options)
        return super().generate(*args, **options)


def tone(seed: int, seconds: float = 0.6, rate: int = RATE, channels: int = 1) -> Any:
    """Return noise that 16 bits hold exactly, float32 [frames, channels]."""
    count = round(seconds * rate)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-20_000, 20_000, (count, channels), generator=generator) / 32768).float().numpy()


def wav(samples: Any, rate: int = RATE, bits: int = 16, kind: int = 1, extensible: bool = False) -> bytes:
    """Return a WAV file.

    Args:
        samples: [frames, channels].
        kind: 1 for PCM, 3 for floating-point numbers.
    """
    channels = samples.shape[1]
    if kind == 3:
        data = samples.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = (numpy.round(samples * 128) + 128).clip(0, 255).astype("u1").tobytes()
    else:
        wide = numpy.round(samples.astype("f8") * 2 ** (bits - 1)).astype("<i4")
        data = wide[..., None].view("u1")[..., : bits // 8].tobytes()
    return wav_of(data, channels, rate, bits, kind, extensible)


def wav_of(
    data: bytes,
    channels: int = 1,
    rate: int = RATE,
    bits: int = 16,
    kind: int = 1,
    extensible: bool = False,
    **lies: Any,
) -> bytes:
    """Return a WAV file with some bytes as samples.

    Args:
        lies: ``size``, ``length`` or ``block``: other values of these fields of the header.
    """
    block = lies.get("block", channels * bits // 8 % 65536)
    layout = struct.pack("<HHIIHH", kind, channels, rate, rate * block % 2**32, block, bits)
    if extensible:
        guid = struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
        layout = b"\xfe\xff" + layout[2:] + struct.pack("<HHI", 22, bits, 0) + guid
    chunks = b"fmt " + struct.pack("<I", len(layout)) + layout
    chunks += b"LIST" + struct.pack("<I", 3) + b"abc\0"  # of an odd length
    chunks += b"data" + struct.pack("<I", lies.get("length", len(data))) + data
    return b"RIFF" + struct.pack("<I", lies.get("size", len(chunks) + 4)) + b"WAVE" + chunks


def resampled(x: Any, rate: int, wanted: int) -> Any:
    """Return a sound at another rate. Each sample is the sum of the old ones, weighted by a windowed sinc."""
    cutoff = min(rate, wanted) * ROLLOFF
    made = numpy.zeros(math.ceil(len(x) * wanted / rate))
    for i in range(len(made)):
        distance = (numpy.arange(len(x)) / rate - i / wanted) * cutoff
        near = numpy.abs(distance) < ZEROS
        window = numpy.i0(BETA * numpy.sqrt(1 - (distance[near] / ZEROS) ** 2)) / numpy.i0(BETA)
        made[i] = (x[near] * numpy.sinc(distance[near]) * window).sum() * cutoff / rate
    return made


def part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    """Return a part of a message with a sound."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def form(fields: list[tuple[str, Any]], file: bytes | None, boundary: str = "xyz") -> tuple[bytes, list[Any]]:
    """Return the body and the headers of a form."""
    pieces = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields
    ]
    if file is not None:
        head = 'Content-Disposition: form-data; name="file"; filename="../../etc/passwd"\r\nContent-Type: audio/wav'
        pieces.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + file + b"\r\n")
    body = b"".join(pieces) + f"--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}".encode()
    return body, [(b"host", b"localhost"), (b"content-type", kind)]


def words(size: int, special: dict[str, int], **options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for each token, and some special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    table = {f"w{i}": i for i in range(size) if i not in special.values()}
    made = Tokenizer(models.WordLevel({**table, **special}, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1", **options)
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def mel(bins: int) -> Any:
    """Return an extractor of spectrograms in windows of `WINDOW` seconds."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=bins, sampling_rate=RATE, chunk_length=WINDOW)


def hearing_config(model_type: str) -> Any:
    """Return the configuration of a tiny model whose chats take sounds."""
    config = zoo.config(model_type)
    config.get_text_config().max_position_embeddings = 512
    if model_type == "qwen3_asr":
        config.audio_config.n_window = 50
    elif model_type.startswith("granite_speech"):
        config.encoder_config.input_dim = 2 * 4  # two frames of `hearing_processor`
    elif model_type == "fun_asr_nano":
        config.audio_config.num_mel_bins = 4  # the least that torchaudio takes
    else:
        config.audio_config.max_source_positions = 50 * WINDOW
    config.dtype = torch.float64
    return config


def hearing_processor(model_type: str) -> Any:
    """Return the processor of `hearing_config`."""
    import transformers

    config = hearing_config(model_type)
    size = config.get_text_config().vocab_size
    if model_type.startswith("granite_speech"):
        extractor = transformers.GraniteSpeechFeatureExtractor(
            n_mels=4, projector_window_size=config.window_size, projector_downsample_rate=config.downsample_rate
        )
        return transformers.GraniteSpeechProcessor(extractor, words(size, {"<sound>": 98}), "<sound>", TEMPLATE)
    bins = config.audio_config.num_mel_bins
    if model_type == "fun_asr_nano":
        extractor = transformers.FunAsrNanoFeatureExtractor(bins, num_frames_lfr=config.audio_config.num_stacked_frames)
        return transformers.FunAsrNanoProcessor(extractor, words(size, {"<sound>": 98}), TEMPLATE, "<sound>")
    if model_type == "qwen2_audio":  # with its own template
        tokens = words(size, {"<|AUDIO|>": 98, "<|audio_bos|>": 97, "<|audio_eos|>": 96})
        return transformers.Qwen2AudioProcessor(mel(bins), tokens)
    if model_type == "qwen3_asr":
        named = {"audio_token": "<sound>", "audio_bos_token": "<b>", "audio_eos_token": "<e>"}
        tokens = words(size, {"<sound>": 98, "<b>": 97, "<e>": 96}, extra_special_tokens=named)
        return transformers.Qwen3ASRProcessor(transformers.Qwen3ASRFeatureExtractor(bins), tokens, TEMPLATE)
    kinds = {"audioflamingo3": "AudioFlamingo3", "musicflamingo": "MusicFlamingo", "glmasr": "GlmAsr"}
    cls = getattr(transformers, f"{kinds[model_type]}Processor")
    tokens = words(size, {"<sound>": 98})
    return cls(mel(bins), tokens, TEMPLATE, audio_token="<sound>", max_audio_len=2 * WINDOW + 1)


WHISPER_TOKENS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
"""Special tokens of the tiny Whisper, whose other tokens are the 256 bytes, and times."""
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, _, NO_TIMES = range(256, 256 + len(WHISPER_TOKENS))
_WHISPER_SIZE = NO_TIMES + 1 + 50 * WINDOW + 1


def set_whisper_generation(settings: Any) -> None:
    """Give the tiny Whisper the languages, tasks and times of a published one."""
    settings.no_timestamps_token_id, settings.is_multilingual, settings.max_length = NO_TIMES, True, 12
    settings.return_timestamps = False
    settings.lang_to_id = {"<|en|>": ENGLISH, "<|de|>": GERMAN}
    settings.task_to_id = {"transcribe": TRANSCRIBE, "translate": TRANSLATE}
    settings.prev_sot_token_id, settings.eos_token_id, settings.pad_token_id = PREVIOUS, END, END
    settings.decoder_start_token_id = START


def save_transcribing_model(model: Any, processor: Any, folder: Path) -> None:
    """Save a model with its processor, and all settings of its generation: transformers leaves out those of Whisper."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    file = folder / "generation_config.json"
    if model.config.model_type == "whisper":
        settings = {key: value for key, value in vars(model.generation_config).items() if not key.startswith("_")}
        file.write_text(json.dumps(settings))


def whisper_tokens() -> Any:
    """Return a tokenizer of Whisper, with a token for each byte."""
    from tokenizers import AddedToken
    from transformers import WhisperTokenizer
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = WhisperTokenizer({text: i for i, text in enumerate(bytes_to_unicode().values())}, [])
    tokenizer.add_tokens([AddedToken(text, special=True) for text in WHISPER_TOKENS])
    tokenizer.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", special=False) for i in range(50 * WINDOW + 1)])
    return tokenizer


def transcribing_model(model_type: str) -> tuple[Any, Any]:
    """Return a tiny model that transcribes, in float64, and its processor."""
    import transformers

    config = zoo.config(model_type)
    config.dtype = torch.float64
    if model_type == "whisper":
        config.max_source_positions, config.vocab_size = 50 * WINDOW, _WHISPER_SIZE
        config.eos_token_id, config.pad_token_id, config.decoder_start_token_id = END, END, START
        config.bos_token_id = END
    elif model_type == "speech_to_text":
        config.max_source_positions = 6000
    elif model_type == "moonshine":
        config.max_position_embeddings = 64
    heads = {"whisper": "WhisperForConditionalGeneration", "wav2vec2": "Wav2Vec2ForCTC"}
    model = reference_model(heads.get(model_type) or zoo.main_head(model_type), config, 0).eval()
    if model_type == "whisper":
        set_whisper_generation(model.generation_config)
        return model, transformers.WhisperProcessor(mel(config.num_mel_bins), whisper_tokens())
    tokens = words(config.vocab_size, {"<s>": 98})
    if model_type == "speech_to_text":
        bins = config.input_feat_per_channel
        extractor = transformers.Speech2TextFeatureExtractor(feature_size=bins, num_mel_bins=bins)
        return model, transformers.Speech2TextProcessor(extractor, tokens)
    return model, transformers.Wav2Vec2Processor(transformers.Wav2Vec2FeatureExtractor(), tokens)
