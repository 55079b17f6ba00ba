"""Calls with images in the running batch: tokens of plain transformers, beside rows with and without images."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oslo_models import registry
from oslo_models.deploy.messages import Failure, Reused
from oslo_models.deploy.running_batch.admission import (
    TEXT_ONLY,
    Admission,
    reason_against,
    reason_against_drafts,
    reason_against_padding,
)
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.prompt_images import PromptImages, images_of_call
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.step import MOST_FORGOTTEN, Step
from oslo_models.media.items import images_of_rows

from support import running, zoo
from support.batch_loop import Application, request
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import reference_model

pytestmark = pytest.mark.skipif(
    "mm_encoder_outputs" not in zoo.parameters_of_forward("LlavaForConditionalGeneration"),
    reason="this transformers does not take encoded images",
)
INSTALLED = [kind for kind in zoo.WITH_IMAGES if zoo.fault_of_release(kind) is None]
JOINING = [kind for kind in INSTALLED if kind not in TEXT_ONLY and reason_against(zoo.config(kind)) is None]
LIMITS = BatchLimits(3, 64, 4)


def rows_of(batch: dict[str, Tensor], config: Any) -> list[dict[str, Tensor]]:
    """Return one call for each row of a batch, with the images of the row and without padding."""
    images = {name: batch[name] for name in batch.keys() & zoo.IMAGES}
    rows = images_of_rows({"input_ids": batch["input_ids"], **images}, config)
    marks = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
    plain = [name for name in ("input_ids", "attention_mask", *marks) if name in batch]
    calls = []
    for row, own in enumerate(rows):
        kept = batch["attention_mask"][row].bool()
        calls.append({**{name: batch[name][row][kept][None] for name in plain}, **own})
    return calls


def calls_of(name: str, config: Any, seed: int) -> list[dict[str, Any]]:
    """Return calls with 0 to 2 images: of one row and of three; the same tokens with the same and with other images."""
    batches = [zoo.batch(name, config, seed + number) for number in range(3)]
    prompts = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
    other = {**prompts[0], **{key: prompts[1][key] for key in prompts[0].keys() & zoo.IMAGES}}
    calls: list[dict[str, Any]] = [*rows_of(prompts[0], config), *rows_of(other, config), prompts[1]]
    calls += [*rows_of(prompts[0], config), *rows_of(prompts[2], config)]
    ways = [{"do_sample": False}, {"do_sample": False, "repetition_penalty": 1.3}, {"do_sample": True, "top_k": 20}]
    rng = random.Random(seed)
    return [
        {
            **call,
            **(ways[number % 3] if len(call["input_ids"]) == 1 else ways[0]),
            **{"max_new_tokens": rng.randint(6, 16), "seed": rng.getrandbits(32), "pad_token_id": 0},
        }
        for number, call in enumerate(calls)
    ]


def sensitive_model(name: str, config: Any, seed: int) -> Any:
    """Return a model of transformers whose tokens depend on all of the prompt, and on its images."""
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    whole = reference_model(name, config, seed).eval().requires_grad_(False)
    for parameter in whole.parameters():
        if parameter.dim() > 1:
            parameter *= 4
    return whole


def compare(pool: Pool, model_type: str, folder: Path, seed: int, drafted: int = 0, **sizes: int) -> None:
    name, config = zoo.main_head(model_type), running.without_ties(zoo.config(model_type))
    if model_type == "hy_v4_vl":  # its images have many tokens
        config.text_config.max_position_embeddings = LIMITS.length
    whole = sensitive_model(name, config, seed)
    whole.save_pretrained(folder)
    calls = calls_of(name, config, seed)
    if reason_against_padding(config) is not None:  # padded calls do not join
        calls = [call for call in calls if call["attention_mask"].all()]
    limits = replace(LIMITS, chunk=8, drafted=drafted)
    admission = Admission(config, limits, takes_features=True)
    assert all(admission.joins(running_arguments(call), whole.generation_config, False) for call in calls)
    with lifted_casts():
        expected = [running.alone(whole, call) for call in calls]
    assert any(expected[row].tolist() != expected[row + 3].tolist() for row in (0, 2))  # other images
    ranks = sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
    for found in pool.run(ranks, running.differences, name, model_type, folder, sizes, calls, expected, seed, limits):
        assert found == []


def running_arguments(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "seed"}


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.stacks, id="tp"),
        pytest.param({"pipeline_parallel_size": 2}, id="pp"),
    ],
)
@pytest.mark.parametrize("model_type", JOINING)
def test_rows_with_images_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, model_type: str, sizes: dict[str, int]
) -> None:
    cls: Any = registry.find(zoo.main_head(model_type))
    if "pipeline_parallel_size" in sizes and (reason := cls.plan(zoo.config(model_type)).pipeline.single_stage_reason):
        pytest.skip(f"no stages: {reason}")
    compare(pool, model_type, tmp_path, seed, **sizes)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("model_type", JOINING)
def test_rows_with_images_and_drafts_get_their_own_tokens(
    pool: Pool, tmp_path: Path, seed: int, model_type: str
) -> None:
    """Positions go on from those of the images."""
    if (reason := reason_against_drafts(zoo.config(model_type), LIMITS.length)) is not None:
        pytest.skip(reason)
    compare(pool, model_type, tmp_path, seed, 4, tensor_parallel_size=2)


@pytest.mark.stacks
def test_most_types_with_images_join() -> None:
    assert {"llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "internvl", "idefics3"} <= {*JOINING}
    assert not {"molmo2", "paligemma"} & {*JOINING}


# In this process ------------------------------------------------------------------------------------------------------


TYPES = pytest.mark.parametrize("model_type", ["llava", "qwen2_5_vl"])


def pair(model_type: str, seed: int) -> tuple[str, Any, Any]:
    """Return the name of a class, a model in float64, and the same model in plain transformers."""
    name, config = zoo.main_head(model_type), zoo.config(model_type)
    whole = sensitive_model(name, config, seed)
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, dtype=torch.float64).eval()
    model.load_state_dict(whole.state_dict())
    return name, model.requires_grad_(False), whole


def one_row(name: str, config: Any, seed: int, row: int, new: int, **options: Any) -> dict[str, Any]:
    call = rows_of(zoo.batch(name, config, seed), config)[row]
    return {**call, "max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}


def expect(application: Application, number: int, whole: Any, call: dict[str, Any]) -> None:
    assert application.answer(number).result.tolist() == whole.generate(**call).tolist()


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_prefixes_are_found_by_the_pixels_too(model_type: str, seed: int) -> None:
    """The same tokens with other pixels are another prompt. With the same pixels, the tower does not run again."""
    name, model, whole = pair(model_type, seed)
    call = one_row(name, model.config, seed, 2, 6)
    other = {**call, "pixel_values": call["pixel_values"].flip(0)}
    application = Application(model, LIMITS)
    for number, each in enumerate((call, other, call)):
        application.send(20 * number, request(number, each, config=model.config))
    application.run()
    assert whole.generate(**call).tolist() != whole.generate(**other).tolist()
    for number, each in enumerate((call, other, call)):
        expect(application, number, whole, each)
    length = call["input_ids"].shape[1]
    assert [each.tokens for each in application.sent if isinstance(each, Reused)] == [length - 1]


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_answer_about_an_image_is_part_of_the_next_prompt(model_type: str, seed: int) -> None:
    """The second turn of a chat computes its new tokens only: the towers see no image again."""
    name, model, whole = pair(model_type, seed)
    call = {**one_row(name, model.config, seed, 0, 6), "suppress_tokens": [model.config.image_token_id]}
    answer = whole.generate(**call)
    turn = {**call, "input_ids": torch.cat((answer, torch.tensor([[5, 7]])), 1)}
    turn["attention_mask"] = torch.ones_like(turn["input_ids"])
    if "mm_token_type_ids" in call:
        more = turn["input_ids"].shape[1] - call["input_ids"].shape[1]
        turn["mm_token_type_ids"] = torch.nn.functional.pad(call["mm_token_type_ids"], (0, more))
    application, seen = Application(model, LIMITS), []
    tower = getattr(model.base_model, "visual", None) or model.base_model.vision_tower
    tower.register_forward_hook(lambda *each: seen.append(each))
    application.send(0, request(0, call, config=model.config))
    application.send(20, request(1, turn, config=model.config))
    application.run()
    expect(application, 0, whole, call)
    expect(application, 1, whole, turn)
    assert len(seen) == 1
    assert [each.tokens for each in application.sent if isinstance(each, Reused)] == [answer.shape[1] - 1]


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_prompt_that_ends_with_an_image_is_computed_from_its_first_token(model_type: str, seed: int) -> None:
    """The last token of a prompt is always computed, and no image is encoded in part."""
    name, model, whole = pair(model_type, seed)
    call = one_row(name, model.config, seed, 2, 6)
    end = int(call["input_ids"][0].eq(model.config.image_token_id).nonzero()[-1]) + 1
    call |= {key: call[key][:, :end] for key in ("input_ids", "attention_mask", "mm_token_type_ids") if key in call}
    application = Application(model, LIMITS)
    for number in range(2):
        application.send(20 * number, request(number, call, config=model.config))
    application.run()
    for number in range(2):
        expect(application, number, whole, call)
    assert [each.tokens for each in application.sent if isinstance(each, Reused)] == [end - 4]


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_rows_get_tokens_while_images_are_encoded(model_type: str, seed: int) -> None:
    """Between the images of a prompt, and between an image and its chunk, the others get their tokens."""
    name, model, whole = pair(model_type, seed)
    text, images = (
        one_row(name, model.config, seed, 1, 20),
        one_row(name, model.config, seed + 1, 2, 14),
    )  # takes the slot of the text
    application = Application(model, LIMITS)
    application.send(0, request(0, text))
    application.send(4, request(1, images, config=model.config))
    right, steps = application.batch.runners[0].run, list[Step]()

    def run(step: Step) -> Any:
        steps.append(step)
        return right(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(application.batch.runners[0], "run", run)
        application.run()
    expect(application, 0, whole, text)
    expect(application, 1, whole, images)
    begin = next(number for number, step in enumerate(steps) if step.encodes)
    join = next(number for number, step in enumerate(steps) if step.joins and step.number == 1)
    encoded = [step.images for step in steps if step.encodes and step.images[0] < step.images[1]]
    assert encoded == [(0, 1), (1, 2)]
    kinds = ["rows" if step.tokens else "prompt" for step in steps[begin : join + 1]]
    assert all(former == "rows" or kind == "rows" for former, kind in zip(kinds, kinds[1:], strict=False))


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_images_that_fail_end_their_call_only(model_type: str, seed: int) -> None:
    name, model, whole = pair(model_type, seed)
    text, images = one_row(name, model.config, seed, 1, 20), one_row(name, model.config, seed + 1, 2, 5)
    pixels = images["pixel_values"]
    wrong = {**images, "pixel_values": pixels[:, 1:]}  # channels, or values of a patch, are missing
    application = Application(model, LIMITS)
    for number, call in enumerate((text, wrong, images)):
        application.send(2 * number, request(number, call, config=model.config))
    application.run()
    failure = application.answer(1)
    assert isinstance(failure, Failure) and isinstance(failure.error, (RuntimeError, ValueError))
    expect(application, 0, whole, text)
    expect(application, 2, whole, images)


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_images_of_several_rows_that_fail_end_their_call_once(model_type: str, seed: int) -> None:
    """Two groups of rows, as on two stages: a row's step is published when the images of another row fail."""
    name, model, whole = pair(model_type, seed)
    row = one_row(name, model.config, seed, 2, 5)
    both = {key: torch.cat((value, value)) if isinstance(value, Tensor) else value for key, value in row.items()}
    wrong = {**both, "pixel_values": both["pixel_values"][:, 1:]}
    application = Application(model, LIMITS, groups=2)
    for number, call in enumerate((wrong, both)):
        application.send(number, request(number, call, config=model.config))
    application.run()
    assert isinstance(application.answer(0), Failure)
    expect(application, 1, whole, both)


@pytest.mark.stacks
@TYPES
@torch.no_grad()
def test_images_of_calls_that_end_early_are_dropped(model_type: str, seed: int) -> None:
    """Calls are cancelled before their prompts are computed. Steps tell the followers."""
    name, model, whole = pair(model_type, seed)
    calls = [one_row(name, model.config, seed + number, 1, 30) for number in range(3)]
    application = Application(model, LIMITS)
    for number, call in enumerate(calls):
        application.send(0, request(number, call))
    waiting = range(3, 3 + MOST_FORGOTTEN + 2)
    for number in waiting:
        call = one_row(name, model.config, seed + number, 2, 5)
        application.send(1, request(number, call, config=model.config))
        application.cancel(8, number)
    published, forgotten = application.batch.channel.publish, []

    def publish(step: Step) -> None:
        assert Step.decode(step.encode()) == step and len(step.forgotten) <= MOST_FORGOTTEN
        forgotten.extend(step.forgotten)
        assert len(application.batch._images) in (0, len(waiting))
        published(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(application.batch.channel, "publish", publish)
        application.run()
    assert sorted(forgotten) == [*waiting] and not application.batch._images
    for number, call in enumerate(calls):
        expect(application, number, whole, call)


# Without a model ------------------------------------------------------------------------------------------------------


def some_images(spans: list[tuple[int, int]], length: int) -> PromptImages:
    ids = torch.arange(5, 5 + length)[None]
    for start, stop in spans:
        ids[0, start:stop] = 1
    return PromptImages(0, ids, {}, spans, [-9 - number for number in range(len(spans))], 1)


PIECES = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=8)


@pytest.mark.stacks
@given(PIECES, st.integers(1, 7), st.integers(0, 60))
def test_chunks_hold_whole_images(pieces: list[tuple[bool, int]], size: int, reused: int) -> None:
    """Every token is in one chunk, every image is encoded once and before its chunk, and none is cut."""
    spans, length = [], 0
    for seen, count in pieces:
        if seen:
            spans.append((length, length + count))
        length += count

    class Row:
        number, new, ended, shares = 0, (), False, True

        def __init__(self) -> None:
            self.images = some_images(spans, length)
            self.prompt, self.keys = self.images.ids[0].tolist(), self.images.reuse_keys()
            self.tenant = self.adapter = 0

    row, scheduler, chunks, encoded = Row(), Scheduler(2, size), list[int](), list[int]()
    scheduler.add(row)
    for number in range(100):
        step = scheduler.plan(number)
        assert Step.decode(step.encode()) == step and step.encodes == (not step.chunk)
        assert step.begins == (number == 0)
        if step.encodes:
            encoded += range(*step.images)
            continue
        begin, end = len(chunks), len(chunks) + len(step.chunk)
        chunks += step.chunk
        assert not any(first < end < stop for first, stop in spans)
        assert all(number in encoded for number, (first, _) in enumerate(spans) if begin <= first < end)
        assert len(step.chunk) <= size or (begin, end) in spans
        if step.joins:
            break
    assert chunks == row.prompt and encoded == [*range(len(spans))]
    whole = row.images.whole(min(reused, length))
    assert whole <= reused and not any(first < whole < stop for first, stop in spans)
    assert whole == min(reused, length) or any(first == whole < min(reused, length) for first, _ in spans)


@pytest.mark.stacks
def test_digests_tell_pixels_sizes_and_order_apart(seed: int) -> None:
    name, config = zoo.main_head("qwen2_5_vl"), zoo.config("qwen2_5_vl")
    batch = {key: value for key, value in zoo.batch(name, config, seed).items() if key != "labels"}
    (first, second), (again, _) = (images_of_call(batch, config) for _ in range(2))
    assert first.digests == again.digests and len({*first.digests, *second.digests}) == 3
    assert all(each < 0 and each.bit_length() > 200 for each in (*first.digests, *second.digests))
    changed = batch["pixel_values"].clone()
    changed[0, 0] += 1e-9
    assert images_of_call({**batch, "pixel_values": changed}, config)[0].digests != first.digests
    grids = batch["image_grid_thw"].clone()
    grids[0] = torch.tensor([1, 2, 8])
    assert images_of_call({**batch, "image_grid_thw": grids}, config)[0].digests != first.digests
    assert [key for key in first.reuse_keys() if key >= 0] == first.ids[first.ids != config.image_token_id].tolist()


@pytest.mark.stacks
def test_calls_that_do_not_fit_are_left_to_generate(seed: int) -> None:
    """Their images do not fit the tokens, or the model takes no encoded images."""
    name, config = zoo.main_head("llava"), zoo.config("llava")
    call = one_row(name, config, seed, 2, 3)
    defaults = reference_model(name, config, seed).generation_config
    admission = Admission(config, LIMITS, takes_features=True)
    assert admission.joins(call, defaults, False)
    assert not Admission(config, LIMITS).joins(call, defaults, False)
    for change in (
        {"pixel_values": torch.randn(3, 3, 16, 16)},
        {"pixel_values": "a picture"},
        {"pixel_values": None, "image_sizes": [[16, 16]]},
        {"pixel_values": list(call["pixel_values"])},
        {"pixel_values_videos": torch.randn(1, 2, 3, 16, 16)},
        {"input_ids": call["input_ids"] + config.text_config.vocab_size},
    ):
        assert not admission.joins({**call, **change}, defaults, False), change
