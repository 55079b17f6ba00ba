"""Sounds in chats: answers are those of plain transformers, and limits come before any computation."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")

from oslo_models.cli.main import make_parser
from oslo_models.server import sounds
from oslo_models.server.app import application
from oslo_models.server.command import _hears, _kind
from oslo_models.server.images import ImageLimits
from oslo_models.server.media_chats import MediaChats
from oslo_models.server.sound_files import SoundFile
from oslo_models.server.sounds import HEARING, SoundLimits

from support import zoo
from support.float64 import lifted_casts
from support.http_server import StubModel, call, connect, post_bytes, post_json, read_answer
from support.pool import Pool
from support.reference import TOLERANCE, differences, parallel_model, reference_model
from support.served import serving
from support.sounds import (
    RATE,
    TEMPLATE,
    WINDOW,
    Recording,
    hearing_config,
    hearing_processor,
    part,
    resampled,
    tone,
    wav,
    wav_of,
    words,
)

TYPES = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(bool(sounds.missing_package(kind)), reason=f"needs {HEARING[kind].package}"),
    )
    for kind in HEARING
]


def local_model(model_type: str) -> Recording:
    model = reference_model(zoo.main_head(model_type), hearing_config(model_type), 0)
    model.generation_config.eos_token_id = None
    return Recording(model)


@pytest.fixture(scope="module")
def local() -> Recording:
    return local_model("qwen2_audio")


@pytest.fixture(scope="module")
def processor() -> Any:
    return hearing_processor("qwen2_audio")


def ask(app: Any, content: Any, **fields: Any) -> tuple[int, Any]:
    messages = [{"role": "w5", "content": content}]
    return post_json(app, "/v1/chat/completions", {"messages": messages, "max_tokens": 6, "temperature": 0, **fields})


def text_of(processor: Any, pieces: list[str | None]) -> str:
    """Return the prompt of a chat in which ``None`` stands for a sound."""
    content = [{"type": "audio"} if each is None else {"type": "text", "text": each} for each in pieces]
    return processor.apply_chat_template([{"role": "w5", "content": content}], add_generation_prompt=True)


def inputs_of(processor: Any, pieces: list[str | None], samples: list[Any]) -> dict[str, Any]:
    """Return the arguments that transformers' processor makes, in float64."""
    given = {"audio": [each[:, 0] for each in samples], "sampling_rate": RATE} if samples else {"audio": None}
    made = processor(text=[text_of(processor, pieces)], return_tensors="pt", **given)
    return {name: value.double() if value.is_floating_point() else value for name, value in made.items()}


def answer_of(model: Any, processor: Any, inputs: dict[str, Any]) -> str:
    out = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# Answers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_answer_about_a_sound_equals_transformers(model_type: str) -> None:
    local, processor = local_model(model_type), hearing_processor(model_type)
    app = application(local, processor, "model")
    for seed in range(2):
        samples = tone(seed)
        inputs = inputs_of(processor, ["w7 w8", None, "w9"], [samples])
        content = [{"type": "text", "text": "w7 w8"}, part(wav(samples)), {"type": "text", "text": "w9"}]
        status, answer = ask(app, content)
        expected = answer_of(local.model, processor, inputs)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)
        length = inputs["input_ids"].shape[1]
        assert answer["usage"] == {"prompt_tokens": length, "completion_tokens": 6, "total_tokens": length + 6}
        assert (inputs["input_ids"] == 98).sum() > 3
        seen = local.calls[-1]
        for name, value in inputs.items():
            assert torch.equal(seen[name], value), name
        status, answer = post_json(
            app,
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "w5",
                        "content": [{**each, "type": each["type"].replace("text", "input_text")} for each in content],
                    }
                ],
                "max_output_tokens": 6,
                "temperature": 0,
            },
        )
        assert (status, answer["output"][-1]["content"][0]["text"]) == (200, expected)
        assert answer["usage"]["input_tokens"] == length
    status, answer = ask(app, "w7 w8")
    expected = answer_of(local.model, processor, inputs_of(processor, ["w7 w8"], []))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)


def test_several_sounds_keep_their_order() -> None:
    local, processor = local_model("qwen2_audio"), hearing_processor("qwen2_audio")
    app = application(local, processor, "model")
    samples = [tone(1, 0.3), tone(2, 1.7), tone(3, 0.5)]
    inputs = inputs_of(processor, [None, "w7", None, None], samples)
    content = [part(wav(each)) for each in samples]
    content.insert(1, {"type": "text", "text": "w7"})
    status, answer = ask(app, content)
    expected = answer_of(local.model, processor, inputs)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)
    assert torch.equal(local.calls[-1]["input_features"], inputs["input_features"])
    assert torch.equal(local.calls[-1]["input_ids"], inputs["input_ids"])


def test_requests_at_once_get_their_own_sounds() -> None:
    local, processor = local_model("audioflamingo3"), hearing_processor("audioflamingo3")
    app = application(local, processor, "model")
    samples = [tone(seed, 0.5) for seed in range(4)]

    def content(number: int) -> list[Any]:
        return [{"type": "text", "text": f"w{40 + number}"}, part(wav(samples[number]))]

    async def ask_all() -> list[Any]:
        bodies = [
            {"messages": [{"role": "w5", "content": content(number)}], "max_tokens": 6, "temperature": 0}
            for number in range(4)
        ]
        calls = [call(app, "POST", "/v1/chat/completions", json.dumps(body).encode()) for body in bodies]
        return list(await asyncio.gather(*calls))

    answers = [json.loads(body)["choices"][0]["message"]["content"] for _, _, body in asyncio.run(ask_all())]
    inputs = [inputs_of(processor, [f"w{40 + number}", None], [each]) for number, each in enumerate(samples)]
    assert answers == [answer_of(local.model, processor, each) for each in inputs]
    for own in inputs:
        seen = next(each for each in local.calls if torch.equal(each["input_ids"], own["input_ids"]))
        assert torch.equal(seen["input_features"], own["input_features"])


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (44100, 2), (48000, 1)])
def test_rates_and_channels_are_converted_for_the_model(rate: int, channels: int) -> None:
    local, processor = local_model("qwen2_audio"), hearing_processor("qwen2_audio")
    app = application(local, processor, "model")
    samples = tone(7, 0.15, rate, channels)
    mono = resampled(samples.astype("f8").mean(1), rate, RATE).astype("f4")
    inputs = inputs_of(processor, [None], [mono[:, None]])
    status, _ = ask(app, [part(wav(samples, rate))])
    assert status == 200
    assert (local.calls[-1]["input_features"] - inputs["input_features"]).abs().max() < 1e-4


def check_tokens(name: str, config: Any, weights: Any, inputs: dict[str, Any], expected: Any) -> None:
    model = parallel_model(name, config, weights, 2, gather_logits=True).eval()
    with lifted_casts(), torch.no_grad():
        assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), expected[0])
        assert not differences("logits", model(**inputs).logits, expected[1], TOLERANCE)


@pytest.mark.parametrize("model_type", [each for each in TYPES if each.values[0] not in ("musicflamingo", "glmasr")])
def test_ranks_answer_as_one_process(pool: Pool, model_type: str) -> None:
    """The tokens and arguments of a chat have the same answer on two ranks, in float64."""
    config, processor = hearing_config(model_type), hearing_processor(model_type)
    chats = MediaChats(processor, config, ImageLimits(), SoundLimits())
    content = [{"text": "w7 w8"}, {**sound(wav(tone(1, 0.9))), "place": "here"}]
    ids, media = chats.encode([{"role": "w5", "content": content}], {"add_generation_prompt": True})
    inputs = {"input_ids": torch.tensor([ids]), **media}
    name = zoo.main_head(model_type)
    model = reference_model(name, config, 0).eval()
    with lifted_casts(), torch.no_grad():
        tokens, logits = model.generate(**inputs, max_new_tokens=6, do_sample=False), model(**inputs).logits
    pool.run(2, check_tokens, name, config, model.state_dict(), inputs, (tokens, logits))


def sound(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"sound": base64.b64encode(data).decode(), "format": kind}


@pytest.mark.parametrize("model_type", TYPES)
def test_types_that_take_sounds_have_a_class(model_type: str) -> None:
    config, args = zoo.config(model_type), make_parser().parse_args(["serve", "model"])
    assert _kind(config, args).class_for(config).__name__ == zoo.main_head(model_type)


def test_types_that_need_a_package_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sounds.importlib.util, "find_spec", lambda name: None)
    parse = make_parser().parse_args
    for kind in ("granite_speech", "fun_asr_nano"):
        with pytest.raises(ValueError, match=r"'.*' needs the package torchaudio: pip install 'oslo-models\[speech\]'"):
            _hears(zoo.config(kind), parse(["serve", "model", "--sounds"]))
        assert not _hears(zoo.config(kind), parse(["serve", "model"]))
    assert _hears(zoo.config("qwen2_audio"), parse(["serve", "model"]))


# Text -----------------------------------------------------------------------------------------------------------------


def test_placeholders_in_the_text_of_a_client_are_text() -> None:
    local, processor = local_model("qwen2_audio"), hearing_processor("qwen2_audio")
    app = application(local, processor, "model")
    texts = ("<|AUDIO|>", "<|audio_bos|><|AUDIO|><|audio_eos|>", "w7 <|AUDIO|> w8")
    for text in texts:
        for content in (text, [{"type": "text", "text": text}]):
            status, _ = ask(app, content)
            assert status == 200
            ids = local.calls[-1]["input_ids"]
            assert not ids.ge(96).logical_and(ids.le(98)).any()
            assert "input_features" not in local.calls[-1]
        status, _ = ask(app, [{"type": "text", "text": text}, part(wav(tone(0)))])
        assert status == 200
        assert (local.calls[-1]["input_ids"] == 98).sum() == inputs_of(processor, [None], [tone(0)])["input_ids"].eq(
            98
        ).sum()


# Limits and refusals --------------------------------------------------------------------------------------------------

WAV = wav(tone(0))


@contextmanager
def refusing_to_decode() -> Iterator[None]:
    """Make the decoding of any sound an error."""

    def decode(self: SoundFile) -> None:
        raise AssertionError("a sound was decoded")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoundFile, "decode", decode)
        yield


TOO_MUCH = {
    "number": ([part(WAV)] * 3, "the request has 3 sounds, more than 2"),
    "length": (
        [part(WAV), part(wav(tone(0, WINDOW + 0.5)))],
        "messages[0].content[1] has 2.5 s of sound; this model reads at most 2 s",
    ),
    "sum": ([part(wav(tone(0, 1.8)))] * 2, "the request has 3.6 s of sound, more than 3"),
    "second": ([part(WAV), part(WAV[:-10])], f"messages[0].content[1] promises {len(WAV) - 8} bytes in its header"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_limits_are_checked_before_any_sound_is_decoded(case: str) -> None:
    app = application(
        local_model("qwen2_audio"), hearing_processor("qwen2_audio"), "model", max_sounds=2, max_sound_seconds=3
    )
    content, problem = TOO_MUCH[case]
    with refusing_to_decode():
        status, answer = ask(app, content)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"].startswith(problem)


def test_model_of_one_sound_refuses_more() -> None:
    local = local_model("audioflamingo3")
    app = application(local, hearing_processor("audioflamingo3"), "model")
    with refusing_to_decode():
        status, answer = ask(app, [part(WAV), part(WAV)])
    assert (status, answer["error"]["message"]) == (
        400,
        "the request has 2 sounds; this model reads one sound of a chat",
    )
    with refusing_to_decode():
        status, answer = ask(app, [part(wav(tone(0, 2 * WINDOW + 0.1)))])
    assert (status, "this model reads at most 4 s" in answer["error"]["message"]) == (400, True)


def test_tokens_of_sounds_count_against_the_length(local: Recording, processor: Any) -> None:
    app = application(local, processor, "model", max_length=60)
    count = len(local.calls)
    status, answer = ask(app, [part(wav(tone(seed, 1.9))) for seed in range(2)])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "tokens and 6 to come" in answer["error"]["message"]
    assert len(local.calls) == count


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


BROKEN: dict[str, tuple[Any, str]] = {
    "no data": ({}, "has no input_audio with data in base64"),
    "a text": ("abc", "has no input_audio with data in base64"),
    "a list": ([1], "has no input_audio with data in base64"),
    "a number as data": ({"data": 5, "format": "wav"}, "has no input_audio with data in base64"),
    "no format": ({"data": encoded(WAV)}, "input_audio.format is none of wav, flac, mp3"),
    "another format": ({"data": encoded(WAV), "format": "ogg"}, "input_audio.format is none of wav, flac, mp3"),
    "a list as format": ({"data": encoded(WAV), "format": ["wav"]}, "input_audio.format is none of wav, flac, mp3"),
    "a wrong format": ({"data": encoded(WAV), "format": "mp3"}, "is no MP3 file"),
    "further keys": (
        {"data": encoded(WAV), "format": "wav", "url": "http://a"},
        "input_audio has url, and this server",
    ),
    "an address": ({"data": "http://127.0.0.1:1/a.wav", "format": "wav"}, "is not valid base64"),
    "a path": ({"data": "/etc/passwd", "format": "wav"}, "is not valid base64"),
    "another path": ({"data": "/etc/passwd1", "format": "wav"}, "is no WAV file"),
    "a data URL": ({"data": "data:audio/wav;base64," + encoded(WAV), "format": "wav"}, "is not valid base64"),
    "line breaks": ({"data": encoded(WAV)[:60] + "\n" + encoded(WAV)[60:], "format": "wav"}, "is not valid base64"),
    "no padding": ({"data": encoded(WAV + b"x" * (2 - len(WAV) % 3)).rstrip("="), "format": "wav"}, "is not valid"),
    "empty": ({"data": "", "format": "wav"}, "is no WAV file"),
    "cut": ({"data": encoded(WAV[:-100]), "format": "wav"}, "promises"),
    "2^32 bytes": ({"data": encoded(wav_of(WAV, length=2**32 - 1)), "format": "wav"}, "promises 4294967295 bytes"),
    "rate of 0": ({"data": encoded(wav_of(WAV, rate=0)), "format": "wav"}, "sampling rate of 0"),
    "65535 channels": ({"data": encoded(wav_of(WAV, channels=65535)), "format": "wav"}, "channels"),
}


@pytest.mark.parametrize(("value", "problem"), BROKEN.values(), ids=BROKEN)
def test_broken_sounds_are_refused_by_their_place(
    local: Recording, processor: Any, value: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = application(local, processor, "model")
    content = [{"type": "text", "text": "w7"}, {"type": "input_audio", "input_audio": value}]
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "w5", "content": content}]}),
        ("/v1/responses", {"input": [{"role": "w5", "content": content}]}),
    ):
        status, answer = post_json(app, path, fields)
        assert status == 400
        assert answer["error"]["message"].startswith("messages[0].content[1]")
        assert problem in answer["error"]["message"]
        assert "passwd" not in str(answer) and "127.0.0.1:1" not in str(answer)
    assert encoded(WAV)[:40] not in caplog.text


def test_other_parts_are_refused(local: Recording, processor: Any) -> None:
    app = application(local, processor, "model")
    for kind in ("audio_url", "image_url", "audio", "file"):
        status, answer = ask(app, [{"type": kind, kind: {"url": "http://127.0.0.1:1/a.wav"}}])
        assert (status, answer["error"]["message"]) == (
            400,
            f"messages[0].content of type '{kind}' is not supported; this server takes text and sounds",
        )
    status, answer = ask(app, [part(b"x" * (21 << 20))])
    assert status == 413


def test_model_of_text_refuses_sounds_and_large_bodies() -> None:
    tokenizer = words(99, {})
    tokenizer.chat_template = TEMPLATE
    app = application(StubModel(), tokenizer)
    status, answer = ask(app, [part(WAV)])
    assert (status, answer["error"]["message"]) == (
        400,
        "messages[0].content of type 'input_audio' is not supported; this server takes text",
    )
    assert ask(app, [part(bytes(1 << 20))])[0] == 413


def test_flood_beside_text_is_bounded(local: Recording, processor: Any) -> None:
    app = application(local, processor, "model", max_length=64)
    began = time.monotonic()
    status, answer = ask(app, [part(WAV)] * 200 + [{"type": "text", "text": "w7 " * 10**6}])
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = ask(app, [{"type": "input_audio", "input_audio": {}}] * 8000)
    assert status == 400
    status, answer = ask(app, [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}] * 8000)
    assert (status, answer["error"]["message"]) == (400, "the request has 8000 sounds, more than 4")
    assert time.monotonic() - began < 20


def test_two_requests_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch, local: Recording, processor: Any) -> None:
    running, most, lock = 0, 0, threading.Lock()
    decode = sounds.SoundReader.decode

    def slow(self: Any, *args: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return decode(self, *args)

    monkeypatch.setattr(sounds.SoundReader, "decode", slow)
    app = application(local, processor, "model")
    body = json.dumps({"messages": [{"role": "w5", "content": [part(WAV)]}], "max_tokens": 2}).encode()

    async def ask_all() -> list[Any]:
        return list(await asyncio.gather(*(call(app, "POST", "/v1/chat/completions", body) for _ in range(6))))

    assert [status for status, _, _ in asyncio.run(ask_all())] == [200] * 6
    assert most == 2


# The command ----------------------------------------------------------------------------------------------------------


def test_limits_of_sounds_are_options_of_the_command() -> None:
    given = ["serve", "model", "--sounds", "--max-sounds", "3", "--max-sound-seconds", "60"]
    args = make_parser().parse_args(given)
    assert (args.sounds, args.max_sounds, args.max_sound_seconds) == (True, 3, 60.0)
    args = make_parser().parse_args(["serve", "model"])
    assert (args.sounds, args.max_sounds, args.max_sound_seconds) == (None, 4, 1200.0)


def test_command_serves_a_checkpoint_with_sounds(tmp_path: Path) -> None:
    local, processor = local_model("audioflamingo3"), hearing_processor("audioflamingo3")
    local.model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    samples = tone(1)
    expected = answer_of(local.model, processor, inputs_of(processor, ["w7", None], [samples]))
    content = [{"type": "text", "text": "w7"}, part(wav(samples))]
    fields = {"messages": [{"role": "w5", "content": content}], "max_tokens": 6, "temperature": 0}
    with serving(tmp_path, "--tensor-parallel-size", 2, "--dtype", "float64") as running:
        url = running.says(" at http").split(" at ")[1].strip()
        status, _, body = read_answer(connect(url, post_bytes("/v1/chat/completions", json.dumps(fields).encode())))
        assert not any(encoded(wav(samples))[:60] in line for line in running.lines)
    assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, expected)
