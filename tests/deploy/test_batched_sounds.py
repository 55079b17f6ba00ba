"""Calls with sounds in the running batch: tokens of plain transformers, beside other rows."""

from __future__ import annotations

import queue
import random
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList

from oslo_models import registry
from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.messages import Failure, Reply, Request
from oslo_models.deploy.running_batch.admission import Admission, default_limits, reason_against, with_states
from oslo_models.deploy.running_batch.encoder_decoders import EncoderDecoderRunner
from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS, BatchLimits
from oslo_models.deploy.running_batch.loop import Messages, RunningBatch
from oslo_models.deploy.running_batch.plan_channel import SharedMemoryChannel
from oslo_models.deploy.running_batch.prompt_sounds import FEATURES, most_positions
from oslo_models.deploy.running_batch.sound_calls import FRAME_MASKS
from oslo_models.deploy.windows import reason_against_windows

from support import running, zoo
from support.batch_loop import Application
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import reference_model
from support.sounds import (
    PREVIOUS,
    RATE,
    WINDOW,
    save_transcribing_model,
    tone,
    transcribing_model,
)
from support.waiting import LIMIT

pytestmark = pytest.mark.drawn(12, of="file")

LIMITS = BatchLimits(3, 32, 64)
ALONE = ({"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2})
TP_AND_PP = pytest.mark.parametrize("sizes", ALONE, ids=["pp", "tp"])


def config_of(model_type: str) -> Any:
    config = zoo.config(model_type)
    if model_type == "speech_to_text":
        config.max_source_positions = 400
    return config


def sensitive_model(model_type: str, seed: int) -> Any:
    """Return a model of transformers whose tokens depend on the sound and on the first tokens of the decoder."""
    whole = reference_model(zoo.main_head(model_type), config_of(model_type), seed, torch.float64)
    whole = whole.eval().requires_grad_(False)
    for parameter in whole.parameters():
        if parameter.dim() > 1:
            parameter *= 4
    whole.generation_config.decoder_start_token_id = 2
    return whole


def features_of(config: Any, rng: random.Random, rows: int) -> dict[str, Tensor]:
    """Return sounds, with padding where the encoder reads a mask."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    if config.model_type == "whisper":
        shape: tuple[int, ...] = (rows, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator, dtype=torch.float64)}
    longest = rng.randint(30, 60) if config.model_type == "speech_to_text" else rng.randint(2000, 9000)
    shape = (rows, longest, 5) if config.model_type == "speech_to_text" else (rows, longest)
    mask = torch.ones(rows, longest, dtype=torch.long)
    for row in range(1, rows):
        mask[row, rng.randint(longest // 2, longest) :] = 0
    sounds = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {FEATURES[config.model_type]: sounds, "attention_mask": mask}


def calls_of(config: Any, seed: int, count: int) -> list[dict[str, Any]]:
    """Return calls of one or two rows, which begin with several tokens or with the start of the decoder alone."""
    rng, calls = random.Random(seed), []
    for number in range(count):
        way = running.WAYS[number % len(running.WAYS)]
        rows = 2 if not way["do_sample"] and rng.random() < 0.4 else 1
        call = {**way, **features_of(config, rng, rows), "max_new_tokens": rng.randint(4, 12)}
        call |= {"seed": rng.getrandbits(32), "pad_token_id": 0, "decoder_start_token_id": 2}
        if number % 3 < 2:
            length = rng.randint(1, 5)
            first = [[2, *(rng.randrange(3, 90) for _ in range(length))] for _ in range(rows)]
            call["decoder_input_ids"] = torch.tensor(first)
        calls.append(call)
    return calls


def arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate`."""
    return {name: value for name, value in call.items() if name != "seed"}


@torch.no_grad()
def alone(model: Any, call: Mapping[str, Any]) -> Tensor:
    """Return the tokens of transformers' `generate`, without that of Whisper around it."""
    torch.manual_seed(call["seed"])
    return GenerationMixin.generate(model, **arguments(call))


def compare(pool: Pool, model_type: str, folder: Path, seed: int, count: int = 12, **sizes: int) -> None:
    whole = sensitive_model(model_type, seed)
    whole.save_pretrained(folder)
    calls = calls_of(whole.config, seed, count)
    admission = Admission(whole.config, LIMITS)
    assert admission.sounds is not None
    for call in calls:
        assert admission.sounds.joins(arguments(call), whole.generation_config, False)
    with lifted_casts():
        expected = [alone(whole, call) for call in calls]
        other = [alone(whole, {**call, **features_of(whole.config, random.Random(seed), 1)}) for call in calls[2:4]]
    assert any(not torch.equal(*pair) for pair in zip(expected[2:4], other, strict=True))
    name, ranks = zoo.main_head(model_type), max(sizes.values())
    given = (name, model_type, folder, sizes, calls, expected, seed, LIMITS)
    for found in pool.run(ranks, running.differences, *given):
        assert found == []


@TP_AND_PP
@pytest.mark.parametrize("model_type", FEATURES)
def test_rows_with_sounds_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, model_type: str, sizes: dict[str, int]
) -> None:
    cls: Any = registry.find(zoo.main_head(model_type))
    if "pipeline_parallel_size" in sizes and (reason := cls.plan(config_of(model_type)).pipeline.single_stage_reason):
        pytest.skip(f"no stages: {reason}")
    compare(pool, model_type, tmp_path, seed, **sizes)


@pytest.mark.zoo
@pytest.mark.parametrize("model_type", FEATURES)
def test_rows_with_sounds_on_three_ranks(pool: Pool, tmp_path: Path, seed: int, model_type: str) -> None:
    compare(pool, model_type, tmp_path, seed, tensor_parallel_size=3)


# In this process ------------------------------------------------------------------------------------------------------


def pair(model_type: str, seed: int) -> tuple[Any, Any]:
    """Return a model in float64, and the same model in plain transformers."""
    whole = sensitive_model(model_type, seed)
    cls: Any = registry.find(zoo.main_head(model_type))
    model = cls.from_config_with_parallel(whole.config, dtype=torch.float64).eval()
    model.load_state_dict(whole.state_dict())
    model.generation_config = whole.generation_config
    return model.requires_grad_(False), whole


def one_row(config: Any, seed: int, new: int) -> dict[str, Any]:
    way = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0, "seed": 0}
    return {**features_of(config, random.Random(seed), 1), **way, "decoder_start_token_id": 2}


def answered(whole: Any, seed: int, *new: int) -> list[tuple[dict[str, Any], Tensor]]:
    """Return calls of these numbers of new tokens with their answers, no two of which begin with the same tokens."""
    found: list[tuple[dict[str, Any], Tensor]] = []
    for number in range(40):
        call = one_row(whole.config, seed + number, new[len(found)])
        answer = alone(whole, call)
        first = min(answer.shape[1], *(each.shape[1] for _, each in found), 9)
        if not any(torch.equal(answer[:, :first], each[:, :first]) for _, each in found):
            found.append((call, answer))
        if len(found) == len(new):
            return found
    raise AssertionError("the answers do not depend on the sounds")


def message(number: int, call: Mapping[str, Any], config: Any) -> Request:
    rest, sounds = Admission(config, LIMITS).separate_images(arguments(call))
    return Request(number, "generate", (), rest, call["seed"], joins=True, images=sounds)


@pytest.mark.parametrize("model_type", FEATURES)
def test_sound_that_fails_ends_its_call_only(model_type: str, seed: int) -> None:
    model, whole = pair(model_type, seed)
    calls = [one_row(whole.config, seed + number, 14) for number in range(3)]
    name = FEATURES[model_type]
    wrong = {**calls[1], name: calls[1][name].to(torch.complex64)}
    application = Application(model, with_states(whole.config, LIMITS))
    for number, call in enumerate((calls[0], wrong, calls[2])):
        application.send(2 * number, message(number, call, whole.config))
    with torch.no_grad():
        application.run()
    assert isinstance(application.answer(1), Failure)
    for number in (0, 2):
        assert torch.equal(application.answer(number).result, alone(whole, calls[number]))
    assert max(map(len, application.rows)) == 2 and not application.batch._images


@torch.no_grad()
def test_rows_get_a_token_between_two_sounds(seed: int) -> None:
    """Encoding a sound takes as long as many tokens, so the others wait for one sound at most."""
    model, whole = pair("whisper", seed)
    calls = answered(whole, seed, 20, 5, 5)
    limits = with_states(whole.config, BatchLimits(3, 32, most_positions(whole.config)))
    application = Application(model, limits)
    for number, (call, _) in enumerate(calls):
        application.send(2 * bool(number), message(number, call, whole.config))
    runner, kinds = application.batch.runners[0], list[str]()
    run = runner.run

    def noted(step: Any) -> Any:
        kinds.append("sound" if step.encodes else "prompt" if step.chunk else "tokens" if step.tokens else "end")
        return run(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", noted)
        application.run()
    assert kinds.count("sound") == kinds.count("prompt") == 3
    first, second, third = (place for place, kind in enumerate(kinds) if kind == "sound")
    assert first == 0 and "tokens" in kinds[second:third]
    for number, (_, answer) in enumerate(calls):
        assert torch.equal(application.answer(number).result, answer)


def failing_rank(folder: Path, sizes: dict[str, int], failing: int | None, calls: list[Request]) -> list[Any]:
    """Let one rank, or all of them, fail before the second sound is encoded. Return the messages of this rank."""
    cls: Any = registry.find("WhisperForConditionalGeneration")
    model = cls.from_pretrained_with_parallel(folder, dtype=torch.float64, **sizes).eval()
    rank, stages = torch.distributed.get_rank(), sizes.get("pipeline_parallel_size", 1)
    leader = 1 if stages > 1 else 0
    channel = SharedMemoryChannel(folder / "steps", rank, leader, 2, 4096, stages)
    sent: list[Any] = []
    limits = with_states(model.config, BatchLimits(4, 32, 64))
    report = (lambda message, number: sent.append(message), set[int](), lambda: None)
    batch = RunningBatch(model, limits, channel, rank == leader, *report, stages)
    inbox: Any = queue.SimpleQueue()
    for each in calls[1:]:
        inbox.put(each)
    encode, count = EncoderDecoderRunner._encode, list[int]()

    def broken(self: Any, given: dict[str, Any]) -> Any:
        count.append(1)
        if len(count) == 2 and failing in (rank, None):
            raise MemoryError("of one rank")
        return encode(self, given)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(EncoderDecoderRunner, "_encode", broken)
        batch.run(calls[0], Messages(inbox, pytest.fail))
    assert not batch._images and not batch._ahead
    return [(type(each), each.number, getattr(each, "result", None)) for each in sent if hasattr(each, "number")]


@pytest.mark.parametrize(("sizes", "failing"), [(ALONE[0], 0), (ALONE[0], 1), (ALONE[1], None)])
def test_rank_that_cannot_encode_ends_one_call(
    pool: Pool, tmp_path: Path, seed: int, sizes: dict[str, int], failing: int | None
) -> None:
    """Every rank learns of it, and the other rows go on."""
    whole = sensitive_model("whisper", seed)
    whole.save_pretrained(tmp_path)
    calls = [one_row(whole.config, seed + number, 10) for number in range(4)]
    with lifted_casts():
        expected = [alone(whole, call) for call in calls]
    requests = [message(number, call, whole.config) for number, call in enumerate(calls)]
    found = pool.run(2, failing_rank, tmp_path, sizes, failing, requests)
    sent = found.pop(int("pipeline_parallel_size" in sizes))  # of the leader
    assert found == [[]]
    kinds = {number: kind for kind, number, _ in sent}
    assert sorted(kinds) == [0, 1, 2, 3] and [*kinds.values()].count(Failure) == 1
    for kind, number, result in sent:
        if kind is Reply:
            assert torch.equal(result, expected[number])


# What joins -----------------------------------------------------------------------------------------------------------

WHISPER = {"input_features": torch.zeros(1, 5, 18), "temperature": 0.0}
LONG = {"input_features": torch.zeros(1, 5, 40), "return_timestamps": True}
PAIR = {"input_features": torch.zeros(2, 5, 18)}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (WHISPER, True),
        ({**WHISPER, "language": "de", "task": "translate", "return_dict_in_generate": False}, True),
        ({**WHISPER, "temperature": 0.7}, True),
        ({**WHISPER, "temperature": (0.0, 0.4), "compression_ratio_threshold": 1.3}, True),
        ({**LONG, "condition_on_prev_tokens": True, "return_segments": True}, True),
        ({**PAIR, "max_new_tokens": 5}, True),
        ({**PAIR, "temperature": 0.7}, False),  # the rows share a generator
        ({**PAIR, "temperature": (0.0, 0.4)}, False),
        ({**PAIR, "condition_on_prev_tokens": True}, False),  # the tokens before a window are padded
        ({"input_features": torch.zeros(4, 5, 18)}, False),
        ({"input_features": torch.zeros(1, 6, 18)}, False),
        ({"input_features": torch.zeros(1, 5, 18, dtype=torch.long)}, False),
        ({"inputs": torch.zeros(1, 5, 18)}, False),
        ({**WHISPER, "num_beams": 2}, False),
        ({**WHISPER, "return_dict_in_generate": True}, False),
        ({**WHISPER, "return_token_timestamps": True}, False),
        ({**WHISPER, "logprob_threshold": -1.0}, False),  # reads the scores
        ({**WHISPER, "no_speech_threshold": 0.6}, False),  # runs the model in a processor
        ({**WHISPER, "logits_processor": LogitsProcessorList()}, False),
        ({**WHISPER, "decoder_input_ids": torch.zeros(1, 1, dtype=torch.long)}, False),
        ({**WHISPER, "encoder_repetition_penalty": 1.2}, False),
    ],
)
def test_calls_of_whisper_that_join(call: dict[str, Any], expected: bool) -> None:
    whole = sensitive_model("whisper", 0)
    admission = Admission(whole.config, LIMITS)
    assert admission.joins(call, whole.generation_config, False) is expected
    assert not admission.joins(call, whole.generation_config, True)  # streamed
    short = Admission(whole.config, BatchLimits(3, 31))  # a window may have 32 tokens
    assert not short.joins(call, whole.generation_config, False)


IDS = torch.tensor([[2, 5]])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"decoder_input_ids": IDS}, True),
        ({"decoder_input_ids": IDS, "decoder_attention_mask": torch.ones_like(IDS)}, True),
        ({"decoder_input_ids": IDS, "decoder_attention_mask": torch.tensor([[0, 1]])}, False),
        ({"decoder_input_ids": torch.tensor([[5, 2]])}, False),  # transformers puts the start before it
        ({"decoder_input_ids": IDS.repeat(2, 1)}, False),
        ({"max_new_tokens": 31}, True),
        ({"max_new_tokens": 32}, False),
        ({"max_new_tokens": None, "max_length": 33}, False),
        ({"attention_mask": torch.ones(1, 40).flip(1)}, True),
        ({"attention_mask": torch.tensor([[0] + 39 * [1]])}, False),
        ({"attention_mask": torch.zeros(1, 40)}, False),
        ({"attention_mask": torch.ones(1, 39)}, False),
        ({"input_features": torch.zeros(1, 1700, 5), "attention_mask": None}, False),  # too long
        ({"num_beams": 2}, False),
        ({"output_scores": True}, True),  # no result has them
        ({"encoder_no_repeat_ngram_size": 2}, False),
    ],
)
def test_calls_of_other_types_that_join(changes: dict[str, Any], expected: bool) -> None:
    whole = sensitive_model("speech_to_text", 0)
    admission = Admission(whole.config, LIMITS)
    call = {"input_features": torch.zeros(1, 40, 5), "attention_mask": torch.ones(1, 40), "max_new_tokens": 5}
    assert admission.joins({**call, **changes}, whole.generation_config, False) is expected


def test_types_that_join_are_in_the_guide() -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "deployment.md"
    listed = guide.read_text().partition("* **Speech to text**: ")[2].partition(". ")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == FEATURES.keys()


def test_classes_of_applications_and_other_heads_do_not_join() -> None:
    cls: Any = registry.find("WhisperForConditionalGeneration")
    assert reason_against_windows(cls) is None and reason_against(zoo.config("whisper")) is None

    class Own(cls):  # type: ignore[misc]
        __module__ = "own"

    assert "is a class of the application" in str(reason_against_windows(Own))
    assert "does not transcribe" in str(reason_against_windows(registry.find("WhisperForAudioClassification")))


def test_other_releases_of_transformers_compute_sounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that generates in another way, or makes masks in another way, is named."""
    import transformers
    from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

    def generate_with_fallback(self: Any, **kwargs: Any) -> Any:
        return kwargs

    cls: Any = registry.find("WhisperForConditionalGeneration")
    monkeypatch.setattr(WhisperGenerationMixin, "generate_with_fallback", generate_with_fallback)
    assert "changed WhisperGenerationMixin.generate_with_fallback" in str(reason_against_windows(cls))
    assert Admission(config_of("speech_to_text"), LIMITS).reason is None
    monkeypatch.setattr(transformers.Speech2TextModel, FRAME_MASKS, lambda self, mask: mask)
    assert "no Speech2TextModel._get_feature" in str(Admission(config_of("speech_to_text"), LIMITS).reason)


def test_default_rows_count_the_columns_of_both_caches() -> None:
    """Of Whisper large, 64 rows of 448 tokens and 1500 encoder positions do not fit into 16 GiB."""
    import transformers

    sizes = {"d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20}
    config = transformers.WhisperConfig(**sizes, decoder_attention_heads=20, dtype=torch.bfloat16)
    assert default_limits(config, 448, 1).rows == 32
    assert default_limits(config, 448, 0) == DEFAULT_LIMITS


# With workers ---------------------------------------------------------------------------------------------------------


def whisper_calls() -> tuple[Any, list[dict[str, Any]]]:
    """Return a Whisper with the settings of a published one, and calls for short and long sounds."""
    whole, processor = transcribing_model("whisper")
    whole.generation_config.max_length = 24
    whole.generation_config.suppress_tokens, whole.generation_config.begin_suppress_tokens = [5, 9, 200], [32, 256]
    calls = []
    for number in range(11):
        is_long = number % 3 == 2
        samples = tone(number, 3.2 * WINDOW if is_long else 0.5 + 0.1 * number)
        options: dict[str, Any] = {"sampling_rate": RATE, "return_tensors": "pt"}
        if is_long:
            options |= {"truncation": False, "padding": "longest", "return_attention_mask": True}
        made = processor(audio=samples[:, 0], **options)
        call = {name: value.double() if value.is_floating_point() else value for name, value in made.items()}
        timed = {"return_timestamps": True, "condition_on_prev_tokens": number % 2 == 0, "return_segments": True}
        call |= [{"temperature": 0.0}, {"temperature": 0.8}, {**timed, "temperature": 0.6}, timed][number % 4]
        call |= {"return_timestamps": True} if is_long else {}
        call |= {"language": "de", "task": "translate"} if number % 3 == 0 else {}
        calls.append({**call, "seed": number})
    calls[4] |= {"temperature": (0.0, 0.5, 0.9), "compression_ratio_threshold": 0.1}  # each window is drawn anew
    calls[4]["prompt_ids"] = torch.tensor([PREVIOUS, 7, 8])
    calls[7] |= {"input_features": torch.cat([calls[each]["input_features"] for each in (1, 4)]), "temperature": None}
    return (whole, processor), calls


def plain(found: Any) -> Any:
    """Return tokens, and the times of segments, as lists."""
    if isinstance(found, Tensor):
        return found.tolist()
    segments = [
        [(float(each["start"]), float(each["end"]), each["tokens"].tolist(), each["result"].tolist()) for each in row]
        for row in found["segments"]
    ]
    return found["sequences"].tolist(), segments


@pytest.mark.stacks
@TP_AND_PP
def test_windows_of_whisper_join(stand: Any, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Sounds of one and several windows, drawn or not: tokens of transformers, and no call is computed by itself."""
    made, calls = whisper_calls()
    expected = []
    for call in calls:
        torch.manual_seed(call["seed"])
        with torch.no_grad(), lifted_casts():
            expected.append(plain(made[0].generate(**arguments(call))))
    save_transcribing_model(*made, tmp_path)
    cls: Any = registry.find("WhisperForConditionalGeneration")
    options: dict[str, Any] = {"dtype": torch.float64, "deploy": True, "max_batch_size": 4, **sizes}
    with cls.from_pretrained_with_parallel(tmp_path, **options) as model, ThreadPoolExecutor(6) as threads:
        assert model.batch_rows == 4 and all(model.can_join(**arguments(call)) for call in calls)
        joined, call_engine = list[bool](), model._engine.call

        def noted(method: str, *args: Any, **options: Any) -> Any:
            if method == "generate":
                joined.append(options.get("joins", False))
            return call_engine(method, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model._engine, "call", noted)
            asked = [threads.submit(model.generate, **call) for call in calls]
            found = [plain(each.result(LIMIT)) for each in asked]
        assert found == expected
        assert all(joined) and len(joined) > 20
        beams = {**calls[0], "num_beams": 2}
        assert not model.can_join(**arguments(beams)) and model.generate(**beams).shape[0] == 1
        cancellation = Cancellation()
        cancellation.cancel()
        with pytest.raises(CallCancelled):
            model.generate(**calls[2], cancellation=cancellation)
        with pytest.raises(TimeoutError, match=r"timeout=1e-06 s"):
            model.generate(**calls[2], timeout=1e-6)
        with pytest.raises(ValueError, match="Unsupported language"):
            model.generate(**{**calls[0], "language": "xx"})
        assert plain(model.generate(**calls[0])) == expected[0]
