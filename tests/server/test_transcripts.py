"""Transcripts: texts and times are those of plain transformers, and a form does nothing but carry a sound."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")

from transformers import StoppingCriteriaList

from oslo_models import registry
from oslo_models.cli.main import make_parser
from oslo_models.deploy.cancellation import CallCancelled
from oslo_models.deploy.model_runner import ModelRunner
from oslo_models.server.app import application
from oslo_models.server.command import _kind, _transcribes
from oslo_models.server.errors import RequestError
from oslo_models.server.forms import read_form
from oslo_models.server.sound_files import SoundFile
from oslo_models.server.transcriber import CTC, TRANSCRIBING, WHOLE_SECONDS
from oslo_models.server.transcripts import Segment, Transcript, TranscriptionRequest, clock

from support import zoo
from support.float64 import lifted_casts
from support.http_server import LocalModel, StubModel, call, connect, listening, post_bytes, post_json, read_answer
from support.pipelines import model_on_stages
from support.pool import Pool
from support.reference import parallel_model
from support.served import serving
from support.sounds import (
    ENGLISH,
    GERMAN,
    NO_TIMES,
    PREVIOUS,
    RATE,
    WINDOW,
    Recording,
    form,
    save_transcribing_model,
    set_whisper_generation,
    tone,
    transcribing_model,
    wav,
    wav_of,
    words,
)

PATH = "/v1/audio/transcriptions"
OTHERS = ("speech_to_text", "moonshine", "wav2vec2")
SHORT, LONG = tone(1, 1.3), tone(2, 3.2 * WINDOW)


@pytest.fixture(scope="module")
def whisper() -> tuple[Any, Any]:
    return transcribing_model("whisper")


@pytest.fixture(scope="module")
def app(whisper: tuple[Any, Any]) -> Any:
    model, processor = whisper
    return application(LocalModel(model), processor, "model")


def send(app: Any, file: bytes | None, *fields: tuple[str, Any], path: str = PATH) -> tuple[int, str]:
    body, headers = form(list(fields), file)
    status, _, answer = asyncio.run(call(app, "POST", path, body, headers))
    return status, answer.decode()


def refusal(app: Any, file: bytes | None, *fields: tuple[str, Any], path: str = PATH) -> str:
    status, answer = send(app, file, *fields, path=path)
    assert status == 400, answer
    return str(json.loads(answer)["error"]["message"])


# Answers --------------------------------------------------------------------------------------------------------------


def features_of(processor: Any, samples: Any) -> dict[str, Any]:
    """Return the arguments that transformers documents for short and for long sounds, in float64."""
    options: dict[str, Any] = {"sampling_rate": RATE, "return_tensors": "pt"}
    if len(samples) > WINDOW * RATE:
        options |= {"truncation": False, "padding": "longest", "return_attention_mask": True}
    made = processor(audio=samples[:, 0], **options)
    return {name: value.double() if value.is_floating_point() else value for name, value in made.items()}


def text_of(processor: Any, tokens: Any) -> str:
    """Return the text of tokens without times."""
    ids = [token for token in tokens.tolist() if token <= NO_TIMES]
    return processor.tokenizer.decode(ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
def test_transcript_of_whisper_equals_transformers(app: Any, whisper: Any, samples: Any) -> None:
    model, processor = whisper
    inputs = features_of(processor, samples)
    times = {"return_timestamps": True} if samples is LONG else {}
    cases: list[tuple[list[tuple[str, str]], str, dict[str, Any]]] = [
        ([], "transcriptions", {"task": "transcribe"}),
        ([("language", "de")], "transcriptions", {"task": "transcribe", "language": "de"}),
        ([("language", "German"), ("model", "model")], "translations", {"task": "translate", "language": "german"}),
        (
            [("prompt", "w7 w8 w9")],
            "transcriptions",
            {"task": "transcribe", "prompt_ids": processor.get_prompt_ids("w7 w8 w9", return_tensors="pt")},
        ),
    ]
    found = set()
    for fields, path, options in cases:
        expected = text_of(processor, model.generate(**inputs, **options, **times)[0])
        found.add(expected)
        status, answer = send(app, wav(samples), *fields, path=f"/v1/audio/{path}")
        assert (status, json.loads(answer)["text"]) == (200, expected)
        assert json.loads(answer)["usage"] == {"type": "duration", "seconds": math.ceil(len(samples) / RATE)}
        status, answer = send(app, wav(samples), *fields, ("response_format", "text"), path=f"/v1/audio/{path}")
        assert (status, answer) == (200, expected + "\n")
    assert len(found) > 1


@pytest.mark.parametrize("samples", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("language", ["de", None])
def test_times_of_whisper_equal_transformers(app: Any, whisper: Any, samples: Any, language: str | None) -> None:
    model, processor = whisper
    options = {"task": "transcribe", "return_timestamps": True, "return_segments": True, "language": language}
    (segments,) = model.generate(**features_of(processor, samples), **options)["segments"]
    given = [] if language is None else [("language", language)]
    status, answer = send(app, wav(samples), *given, ("response_format", "verbose_json"))
    body = json.loads(answer)
    assert (status, body["task"], body["duration"]) == (200, "transcribe", len(samples) / RATE)
    detected = model.detect_language(features_of(processor, samples)["input_features"][..., : 100 * WINDOW]).item()
    assert body["language"] == (language or {ENGLISH: "en", GERMAN: "de"}[detected])
    assert [each["tokens"] for each in body["segments"]] == [each["tokens"].tolist() for each in segments]
    for own, segment in zip(body["segments"], segments, strict=True):
        assert (own["start"], own["end"]) == (float(segment["start"]), float(segment["end"]))
        assert own["text"].strip() == text_of(processor, segment["tokens"])
    assert [each["id"] for each in body["segments"]] == list(range(len(segments)))
    status, subtitles = send(app, wav(samples), *given, ("response_format", "srt"))
    first = subtitles.split("\n")[:3]
    assert first[0] == "1" and first[2] == text_of(processor, segments[0]["tokens"])
    assert first[1] == f"{clock(float(segments[0]['start']), ',')} --> {clock(float(segments[0]['end']), ',')}"
    assert subtitles.count(" --> ") == len(segments)
    status, subtitles = send(app, wav(samples), *given, ("response_format", "vtt"))
    assert subtitles.startswith(f"WEBVTT\n\n{clock(float(segments[0]['start']), '.')} --> ")


@pytest.mark.parametrize("model_type", OTHERS)
def test_transcripts_of_other_types_equal_transformers(model_type: str) -> None:
    model, processor = transcribing_model(model_type)
    app = application(LocalModel(model), processor, "model")
    for seconds in (0.4, 2.5):
        samples = tone(3, seconds)
        inputs = processor(audio=samples[:, 0], sampling_rate=RATE, return_tensors="pt")
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        if model_type in CTC:
            expected = processor.tokenizer.decode(model(**inputs).logits[0].argmax(-1))
        else:
            length = {"max_new_tokens": {"moonshine": 63, "speech_to_text": 31}[model_type]}
            expected = processor.tokenizer.decode(model.generate(**inputs, **length)[0], skip_special_tokens=True)
        status, answer = send(app, wav(samples))
        assert (status, json.loads(answer)["text"]) == (200, expected.strip())


def whisper_calls(model: Any, inputs: tuple[dict[str, Any], ...]) -> list[Any]:
    """Return the results of the calls that transcripts make, for a short and a long sound."""
    options = {"temperature": 0.0, "return_dict_in_generate": False, "return_timestamps": True}
    set_whisper_generation(model.generation_config)
    first = {"input_features": inputs[0]["input_features"], "force_unique_generate_call": True, "max_new_tokens": 1}
    found = [model.generate(**first, return_dict_in_generate=True).sequences.tolist()]  # the language
    for each in inputs:
        for task in ("transcribe", "translate"):
            found.append(model.generate(**each, **options, task=task).tolist())
        timed = model.generate(**each, **options, return_segments=True, language="<|de|>")
        times = [(float(one["start"]), float(one["end"]), one["tokens"].tolist()) for one in timed["segments"][0]]
        found += [timed["sequences"].tolist(), times]
        prompt = torch.tensor([PREVIOUS, 7, 8])
        found.append(model.generate(**each, **options, prompt_ids=prompt).tolist())
    return found


def check_whisper(
    stages: int, config: Any, weights: Any, inputs: tuple[dict[str, Any], ...], expected: list[Any]
) -> None:
    name = "WhisperForConditionalGeneration"
    make = parallel_model if stages == 1 else partial(model_on_stages, pp=stages)
    model = make(name, config, weights, 2 // stages).eval()
    with lifted_casts(), torch.no_grad():
        assert whisper_calls(model, inputs) == expected


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_transcribe_as_one_process(pool: Pool, whisper: Any, stages: int) -> None:
    """Long sounds too: each rank seeks the same windows, and stages encode each of them together."""
    model, processor = whisper
    inputs = (features_of(processor, SHORT), features_of(processor, LONG))
    with lifted_casts(), torch.no_grad():
        expected = whisper_calls(model, inputs)
    pool.run(2, check_whisper, stages, model.config, model.state_dict(), inputs, expected)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("whisper", "--tensor-parallel-size"),
        ("whisper", "--pipeline-parallel-size"),
        ("wav2vec2", "--tensor-parallel-size"),
        ("moonshine", "--tensor-parallel-size"),
    ],
)
def test_command_serves_transcripts(model_type: str, sizes: str, tmp_path: Path) -> None:
    model, processor = transcribing_model(model_type)
    app = application(LocalModel(model), processor, "model")  # before it is saved, which writes its dtype as a text
    save_transcribing_model(model, processor, tmp_path)
    fields: list[list[tuple[str, str]]] = [[]]
    if model_type == "whisper":
        fields += [[("response_format", "verbose_json")], [("language", "de"), ("prompt", "w7")]]
    with serving(tmp_path, sizes, 2, "--dtype", "float64") as running:
        url = running.says(" at http").split(" at ")[1].strip()
        for samples in (SHORT, LONG):
            for each in fields:
                body, headers = form(each, wav(samples))
                kind = headers[1][1].decode()
                request = post_bytes(PATH, body).replace(b"application/json", kind.encode(), 1)
                status, _, answer = read_answer(connect(url, request))
                expected = asyncio.run(call(app, "POST", PATH, body, headers))[2]
                assert (status, json.loads(answer)) == (200, json.loads(expected))
        status, _, answer = read_answer(connect(url, post_bytes("/v1/completions", b'{"prompt": "w7"}')))
        assert (status, "only transcribes sounds" in answer.decode()) == (400, True)


@pytest.mark.stacks
def test_clients_share_the_running_batch(stand: Any, tmp_path: Path) -> None:
    """Several clients transcribe at once. Their windows are calls that join, with the texts of one client alone."""
    model, processor = transcribing_model("whisper")
    samples = [tone(seed, 0.4 + 0.9 * seed) for seed in range(6)]
    fields: list[list[tuple[str, str]]] = [
        *([], [("language", "de")], [("response_format", "verbose_json")], [("prompt", "w7")]),
        *([("response_format", "srt")], [("language", "en"), ("response_format", "verbose_json")]),
    ]
    alone = application(LocalModel(model), processor, "model")
    bodies = [form(own, wav(each)) for own, each in zip(fields, samples, strict=True)]
    with lifted_casts():
        expected = [asyncio.run(call(alone, "POST", PATH, *each))[2] for each in bodies]
    save_transcribing_model(model, processor, tmp_path)
    cls: Any = registry.find("WhisperForConditionalGeneration")
    options: dict[str, Any] = {"dtype": torch.float64, "deploy": True, "tensor_parallel_size": 2}
    with cls.from_pretrained_with_parallel(tmp_path, **options) as deployed:
        app, inner, lock = application(deployed, processor, "model"), deployed._engine.call, threading.Lock()
        running, most, joined = 0, 0, list[bool]()

        def noted(method: str, *args: Any, **given: Any) -> Any:
            nonlocal running, most
            if method != "generate":
                return inner(method, *args, **given)
            with lock:
                running, most = running + 1, max(most, running + 1)
                joined.append(given.get("joins", False))
            try:
                return inner(method, *args, **given)
            finally:
                with lock:
                    running -= 1

        async def ask_all() -> list[Any]:
            return list(await asyncio.gather(*(call(app, "POST", PATH, *each) for each in bodies)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deployed._engine, "call", noted)
            answers = asyncio.run(ask_all())
    assert [(status, body) for status, _, body in answers] == [(200, each) for each in expected]
    assert all(joined) and most > 2


def test_cancelled_sounds_end_before_their_next_window(whisper: Any) -> None:
    model, processor = whisper
    cls: Any = registry.find("WhisperForConditionalGeneration")
    own = cls.from_config_with_parallel(model.config, 1, dtype=torch.float64, seed=0).eval()
    set_whisper_generation(own.generation_config)
    runner = object.__new__(ModelRunner)
    runner.model, runner.progress, runner._cancelled = own, 0, {7}
    criteria = StoppingCriteriaList([runner._cancellation_criterion(7)])
    with pytest.raises(CallCancelled):
        own.generate(**features_of(processor, LONG), return_timestamps=True, stopping_criteria=criteria)
    assert runner.progress == 1
    criteria = StoppingCriteriaList([runner._cancellation_criterion(8)])
    own.generate(**features_of(processor, LONG), return_timestamps=True, stopping_criteria=criteria)
    assert runner.progress > 10


def test_waiting_files_are_decoded_when_their_turn_comes(whisper: Any) -> None:
    """Decoded sounds of waiting requests would fill the memory."""
    model, processor = whisper
    local, release = LocalModel(model), threading.Event()
    decoded, waiting = list[int](), list[int]()
    decode = SoundFile.decode

    def counted(self: SoundFile) -> Any:
        decoded.append(1)
        return decode(self)

    def generate(**options: Any) -> Any:
        release.wait(30)
        return LocalModel.generate(local, **options)

    local.generate = generate  # type: ignore[method-assign]
    app = application(local, processor, "model")
    body, headers = form([], wav(SHORT))

    async def ask_all() -> list[Any]:
        calls = [asyncio.ensure_future(call(app, "POST", PATH, body, headers)) for _ in range(8)]
        await asyncio.sleep(1.0)
        waiting.append(len(decoded))
        release.set()
        return list(await asyncio.gather(*calls))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoundFile, "decode", counted)
        answers = asyncio.run(ask_all())
    assert [status for status, _, _ in answers] == [200] * 8
    assert (waiting, len(decoded)) == ([2], 8)


def test_client_of_openai_gets_transcripts(app: Any) -> None:
    openai = pytest.importorskip("openai")
    expected = json.loads(send(app, wav(SHORT))[1])["text"]
    with listening(app) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        create = client.audio.transcriptions.create
        assert create(model="model", file=("speech.wav", wav(SHORT))).text == expected
        timed = create(
            model="model",
            file=wav(SHORT),
            response_format="verbose_json",
            timestamp_granularities=["segment"],
            temperature=0,
        )
        assert timed.segments[0].start >= 0 and timed.duration == 1.3
        assert create(model="model", file=wav(SHORT), response_format="text").strip() == expected
        assert client.audio.translations.create(model="model", file=wav(SHORT)).text
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            create(model="model", file=wav(SHORT), stream=True)
        with pytest.raises(openai.BadRequestError, match="this server has segments only"):
            create(model="model", file=wav(SHORT), response_format="verbose_json", timestamp_granularities=["word"])
        with pytest.raises(openai.BadRequestError, match="file promises"):
            create(model="model", file=wav(SHORT)[:-10])


def test_times_of_subtitles() -> None:
    assert clock(0.0, ",") == "00:00:00,000"
    assert clock(3723.0456, ".") == "01:02:03.046"
    transcript = Transcript("a", 2.0, [Segment(0.0, 1.0, " a --> b ", [1]), Segment(1.0, 2.0, "c", [2])])
    request = TranscriptionRequest(response_format="srt")
    text = transcript.response(request, "transcribe").body.decode()
    assert text == "1\n00:00:00,000 --> 00:00:01,000\na -> b\n\n2\n00:00:01,000 --> 00:00:02,000\nc\n\n"


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ([("stream", "true")], "stream is not supported by this server"),
        ([("response_format", "diarized_json")], "response_format: "),
        ([("temperature", "2")], "temperature: "),
        ([("temperature", "nan")], "temperature: "),
        ([("temperature", "hot")], "temperature: "),
        ([("chunking_strategy", "auto")], "chunking_strategy is not supported by this server"),
        ([("include[]", "logprobs")], "include[] is not supported by this server"),
        ([("timestamp_granularities[]", "word"), ("response_format", "verbose_json")], "this server has segments only"),
        ([("language", "xx")], "does not know the language 'xx'; it knows en, de"),
        ([("language", "../../x")], "does not know the language"),
        ([("language", "")], "language: "),
        ([("prompt", "w7 " * 5000)], "prompt: "),
        ([("prompt", "w7 " * 9)], "the prompt has 28 tokens, more than 15"),
        ([("model", "other")], "there is no model 'other' here"),
        ([("model", "model"), ("model", "model")], "the form has the field 'model' twice"),
        ([("unknown", "x")], "unknown is not supported by this server"),
        ([("url", "http://127.0.0.1:1/a.wav")], "url is not supported by this server"),
    ],
)
def test_fields_are_refused_by_name(app: Any, fields: list[tuple[str, str]], problem: str) -> None:
    body, headers = form(fields, wav(SHORT))
    status, _, answer = asyncio.run(call(app, "POST", PATH, body, headers))
    assert status == (404 if fields == [("model", "other")] else 400)
    assert problem in json.loads(answer)["error"]["message"]


def test_words_of_a_prompt_are_no_special_tokens(app: Any, whisper: Any) -> None:
    model, processor = whisper
    local = Recording(model)
    recorded = application(local, processor, "model")
    for text in ("<|de|>", "<|0.00|>", "a<|en|>"):
        assert send(recorded, wav(SHORT), ("prompt", text))[0] == 200
        first, *others = local.calls[-1]["prompt_ids"].tolist()
        assert first == PREVIOUS and max(others) < 256
    assert send(app, wav(SHORT), ("stream", "false"), ("prompt", ""))[0] == 200


def test_types_refuse_unsupported_fields() -> None:
    model, processor = transcribing_model("wav2vec2")
    app = application(LocalModel(model), processor, "model")
    for name, value in (("language", "en"), ("prompt", "w7"), ("response_format", "srt"), ("temperature", "0.5")):
        assert "not supported for models of type wav2vec2" in refusal(app, wav(SHORT), (name, value))
    message = refusal(app, wav(SHORT), path="/v1/audio/translations")
    assert message == "translation is not supported for models of type wav2vec2"
    long = wav_of(bytes(int((WHOLE_SECONDS + 1) * RATE * 2)))
    assert refusal(app, long) == "file has 61 s of sound; this model reads at most 60 s"


def test_whisper_without_times_refuses_long_sounds() -> None:
    model, processor = transcribing_model("whisper")
    del model.generation_config.no_timestamps_token_id
    model.generation_config.is_multilingual = False
    app = application(LocalModel(model), processor, "model")
    assert send(app, wav(SHORT))[0] == 200
    assert send(app, wav(SHORT), ("language", "English"))[0] == 200
    message = refusal(app, wav(LONG))
    assert message.startswith(
        "a sound of 6.4 s, longer than 2 s, needs times, and the model's generation_config has no"
    )
    assert refusal(app, wav(SHORT), ("response_format", "srt")).startswith("response_format=srt needs times")
    assert refusal(app, wav(SHORT), ("language", "de")) == "this model does not know the language 'de'; it knows en"
    assert "this model does not translate" in refusal(app, wav(SHORT), path="/v1/audio/translations")


def test_models_do_one_task(app: Any) -> None:
    texts = application(StubModel(), words(99, {}), "model")
    assert refusal(texts, wav(SHORT)) == "the model 'model' only generates text"
    for path, fields in (
        ("/v1/completions", {"prompt": "w7"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w7"}]}),
        ("/v1/embeddings", {"input": "w7"}),
    ):
        status, answer = post_json(app, path, fields)
        assert (status, answer["error"]["message"]) == (400, "the model 'model' only transcribes sounds")


def test_limits_are_checked_before_a_sound_is_decoded(whisper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: SoundFile) -> None:
        raise AssertionError("a sound was decoded")

    monkeypatch.setattr(SoundFile, "decode", decode)
    model, processor = whisper
    app = application(LocalModel(model), processor, "model", max_sound_seconds=5)
    assert refusal(app, wav(LONG)) == "file has 6.4 s of sound; this server reads at most 5 s"
    hour = wav_of(bytes(16 << 20), rate=8000, bits=8)
    assert refusal(app, hour) == "file has 2097.15 s of sound; this server reads at most 5 s"
    assert refusal(app, wav(SHORT)[:-1]).startswith("file promises")
    assert refusal(app, wav_of(b"x" * 9000, length=2**32 - 1)).startswith("file promises 4294967295 bytes")
    assert refusal(app, wav_of(b"x" * 9000, rate=0)).startswith("file has a sampling rate of 0")
    assert refusal(app, b"/etc/passwd") == "file is no WAV, FLAC or MP3 file"
    assert refusal(app, wav(SHORT), ("language", "xx")).startswith("this model does not know")
    status, _ = send(app, bytes(21 << 20))
    assert status == 413


# Forms ----------------------------------------------------------------------------------------------------------------

BODY, HEADERS = form([("model", "m")], b"abc")
KIND = HEADERS[1][1].decode()


def test_form_is_read() -> None:
    fields = {each.name: (each.content, each.is_file) for each in read_form(KIND, BODY)}
    assert fields == {"model": (b"m", False), "file": (b"abc", True)}
    assert read_form('multipart/form-data; boundary="xyz"', BODY)
    content = b"-- xyz --xyz\r\n--xy\r\n\r\n--x yz\r\n-\r\n"  # a boundary begins a line
    assert read_form(KIND, form([], content)[0])[0].content == content


BROKEN_FORMS: dict[str, tuple[str, bytes, str]] = {
    "JSON": ("application/json", b"{}", "the body is not a form"),
    "no type": ("", BODY, "the body is not a form"),
    "no boundary": ("multipart/form-data", BODY, "the body is not a form"),
    "another form": ("application/x-www-form-urlencoded", b"file=x", "the body is not a form"),
    "empty boundary": ('multipart/form-data; boundary=""', BODY, "the body is not a form"),
    "long boundary": (f"multipart/form-data; boundary={'x' * 71}", BODY, "the body is not a form"),
    "another boundary": ("multipart/form-data; boundary=abc", BODY, "does not begin with its boundary"),
    "empty": (KIND, b"", "does not begin with its boundary"),
    "cut": (KIND, BODY[:-10], "is cut or damaged in field 1"),
    "cut in a header": (KIND, BODY[:30], "is cut or damaged in field 0"),
    "no end": (KIND, BODY.replace(b"--xyz--\r\n", b""), "is cut or damaged in field 1"),
    "after its end": (KIND, BODY + b"--xyz\r\n", "goes on after its end"),
    "many fields": (KIND, form([("a", "b")] * 17, None)[0], "more than 16 fields"),
    "a long header": (KIND, BODY.replace(b"form-data; name", b"form-data; " + b"x" * 5000 + b"; name"), "is cut or"),
    "no name": (KIND, BODY.replace(b' name="model"', b""), "field 0 of the form has no name"),
    "an attachment": (KIND, BODY.replace(b"form-data", b"attachment", 1), "field 0 of the form has no name"),
    "no colon": (KIND, BODY.replace(b"Disposition:", b"Disposition", 1), "damaged header"),
    "a line break": (KIND, BODY.replace(b"form-data;", b"form-\ndata;", 1), "damaged header"),
    "base64": (KIND, BODY.replace(b"\r\n\r\nm", b"\r\nContent-Transfer-Encoding: base64\r\n\r\nm"), "send plain bytes"),
}


@pytest.mark.parametrize(("kind", "body", "problem"), BROKEN_FORMS.values(), ids=BROKEN_FORMS)
def test_broken_forms_are_refused(app: Any, kind: str, body: bytes, problem: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_form(kind, body)
    assert (caught.value.status_code, problem in str(caught.value.detail)) == (400, True)
    headers = [(b"host", b"localhost"), (b"content-type", kind.encode())]
    assert asyncio.run(call(app, "POST", PATH, body, headers))[0] == 400


def test_files_are_told_from_fields(app: Any) -> None:
    assert refusal(app, None) == "the form has no file"
    assert refusal(app, b"") == "the form has no file"
    body, headers = form([], wav(SHORT))
    twice = body.removesuffix(b"--xyz--\r\n") + body
    status, _, answer = asyncio.run(call(app, "POST", PATH, twice, headers))
    assert (status, json.loads(answer)["error"]["message"]) == (400, "the form has two files")
    moved = body.replace(b'name="file"', b'name="prompt"')
    status, _, answer = asyncio.run(call(app, "POST", PATH, moved, headers))
    assert (status, "a file in the field 'prompt'" in answer.decode()) == (400, True)
    binary = form([("prompt", "x")], wav(SHORT))[0].replace(b"\r\n\r\nx", b"\r\n\r\n\xff\xfe")
    status, _, answer = asyncio.run(call(app, "POST", PATH, binary, headers))
    assert (status, "'prompt' is not text in UTF-8" in answer.decode()) == (400, True)


def test_flood_of_boundaries_is_read_in_time() -> None:
    began = time.monotonic()
    content = b"\r\n--xy" * (4 << 20)  # almost a boundary, everywhere
    assert len(read_form(KIND, form([], content)[0])[0].content) == len(content)
    with pytest.raises(RequestError, match="more than 16 fields"):
        read_form(KIND, form([("a", "")] * 100_000, None)[0])
    with pytest.raises(RequestError, match=r"is cut or damaged|damaged header"):
        read_form(KIND, b"--xyz\r\n" + b"\r\n--xyz" * (2 << 20))
    assert time.monotonic() - began < 10


def test_pages_of_other_sites_send_no_forms(app: Any) -> None:
    """Browsers send forms to other sites without asking first."""
    body, headers = form([], wav(SHORT))
    for more in ((b"origin", b"https://evil.example"), (b"sec-fetch-site", b"cross-site")):
        status, _, _ = asyncio.run(call(app, "POST", PATH, body, [*headers, more]))
        assert status == 403


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TRANSCRIBING)
def test_types_that_transcribe_have_a_class(model_type: str) -> None:
    config, args = zoo.config(model_type), make_parser().parse_args(["serve", "model"])
    heads = [name for name in zoo.heads(model_type) if name.endswith(("ForCTC", "ForConditionalGeneration"))]
    config.architectures = heads
    assert _transcribes(config, args)
    assert [_kind(config, args).class_for(config).__name__] == heads
