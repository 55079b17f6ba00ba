"""Requests for the running batch, and a batch without workers, where every rank schedules for itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_models.deploy.messages import Request
from oslo_models.deploy.running_batch import slot_parts, step_runner
from oslo_models.deploy.running_batch.admission import Admission, reason_against_padding, with_states
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.penalties import TokenTable
from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.preparation import prepare
from oslo_models.deploy.running_batch.prompt_images import PromptImages
from oslo_models.deploy.running_batch.prompt_sounds import PromptSound, media_of_rows
from oslo_models.deploy.running_batch.row import Call
from oslo_models.deploy.running_batch.runners import runner_of
from oslo_models.deploy.running_batch.sampling import choose_tokens
from oslo_models.deploy.running_batch.scheduler import Scheduler
from oslo_models.deploy.running_batch.slot_states import has_index
from oslo_models.deploy.running_batch.speculation import Drafts, going_on
from oslo_models.deploy.running_batch.static_step import Compute
from oslo_models.deploy.running_batch.step import Step
from oslo_models.deploy.running_batch.step_runner import StepRunner

from support import zoo
from support.float64 import lifted_casts
from support.guesses import Guesses
from support.reference import reference_model

LIMITS = BatchLimits(rows=3, length=32, chunk=4)
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"do_sample": True, "temperature": 0.8, "top_k": 20},
    {"do_sample": True, "top_p": 0.9, "min_new_tokens": 4},
)


def is_decoder(variant: str) -> bool:
    """Whether the main configuration is a decoder that generates text in the installed transformers."""
    if zoo.not_computed(variant):
        return False
    config = zoo.config(variant)
    if config.is_encoder_decoder or getattr(config, "is_decoder", True) is False:
        return False
    return any(zoo.original(name).can_generate() for name in zoo.lm_heads(variant) if "DoubleHeads" not in name)


def head(variant: str, config: Any) -> str:
    """Return the class that generates text from this configuration."""
    name = zoo.lm_head(variant)
    cls: Any = zoo.original(name)
    return name if isinstance(config, cls.config_class) else zoo.main_head(variant)  # of Mllama, a part has a head


def encoder_decoder(variant: str) -> str | None:
    """Return the encoder-decoder class of a type that generates text from tokens, or ``None``."""
    if not zoo.config(variant).is_encoder_decoder:
        return None
    found = (zoo.original(name) for name in zoo.lm_heads(variant) if not name.endswith("ForCausalLM"))
    texts = [cls for cls in found if cls.can_generate() and cls.main_input_name == "input_ids"]
    return texts[0].__name__ if texts else None


def requests(rng: random.Random, count: int, vocab: int = 101, longest: int = 11) -> list[dict[str, Any]]:
    """Arguments of calls of `generate`, each with a ``seed`` for its draws; some have two rows, one of them padded.

    Half of the prompts share a prefix with the previous prompt.
    """
    made = []
    for number in range(count):
        options = {**WAYS[number % len(WAYS)], "max_new_tokens": rng.randint(4, 12), "seed": rng.getrandbits(32)}
        rows = 2 if not options["do_sample"] and rng.random() < 0.4 else 1
        length = rng.randint(1, longest)
        ids = torch.tensor([[rng.randrange(3, vocab) for _ in range(length)] for _ in range(rows)])
        if made and rng.random() < 0.5:
            former = made[-1]["input_ids"][:1, : rng.randint(1, length)]
            ids[:, : former.shape[1]] = former
        mask = torch.ones_like(ids)
        if rows > 1 and length > 1:
            padding = rng.randint(0, length - 1)
            ids[1, :padding], mask[1, :padding] = 0, 0
        made.append({"input_ids": ids, "attention_mask": mask, "pad_token_id": 0, **options})
    return made


def forget_states(model: Any) -> None:
    """Forget the states that RecurrentGemma keeps in its modules: a prompt of one token would begin with them."""
    for module in model.modules():
        if hasattr(module, "conv1d_state"):
            module.conv1d_state = None


def alone(model: Any, given: dict[str, Any]) -> Tensor:
    """Return the tokens that plain transformers generates for one call."""
    options = {key: value for key, value in given.items() if key != "seed"}
    forget_states(model)
    torch.manual_seed(given["seed"])
    with torch.no_grad():
        return model.generate(**options)


@contextmanager
def short_parts(least: int = 8, spare: int = 6) -> Iterator[None]:
    """Context in which the rows of small tests are in several parts, see `slot_parts`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_parts, "LEAST", least)
        patch.setattr(slot_parts, "SPARE", spare)
        patch.setattr(slot_parts, "PATIENCE", 3)
        yield


def static_runner(model: Any, limits: BatchLimits, capture: Callable[[Compute], Compute]) -> StepRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_runner, "capture_of", lambda model: (capture, ""))
        return step_runner.StepRunner(model, limits)


def together(
    model: Any,
    given: Sequence[dict[str, Any]],
    rng: random.Random,
    limits: BatchLimits = LIMITS,
    expected: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Return the results of `_scheduled` with a schedule in which rows meet."""
    for _ in range(4):
        results, steps = _scheduled(model, given, rng, limits, expected)
        if max(len(step.tokens) for step in steps) > 1:
            assert any(step.drafts for step in steps) == bool(limits.drafted)
            return results
    raise AssertionError("each row had left before the next one joined, in four schedules")


@torch.no_grad()
def _scheduled(
    model: Any,
    given: Sequence[dict[str, Any]],
    rng: random.Random,
    limits: BatchLimits = LIMITS,
    expected: Sequence[Tensor] = (),
) -> tuple[list[Tensor | None], list[Step]]:
    """Return the results of calls that arrive at random steps; ``None`` for a few calls dropped during computation.

    Prompts are computed in chunks, or several together.

    Args:
        expected: the results, from which tokens are drafted if the limits say so.
    """
    limits = with_states(model.config, replace(limits, chunk=rng.choice((limits.chunk, limits.length))))
    table = TokenTable()
    calls: dict[int, Call] = {}

    def answer(row: Any) -> list[int]:
        index = calls[row.number].rows.index(row)
        found: list[int] = expected[row.number][index, given[row.number]["input_ids"].shape[1] :].tolist()
        return found

    drafts = Guesses(limits.drafted, rng, answer) if limits.drafted else Drafts(0)
    runner = runner_of(model, limits)
    prefixes = Prefixes(limits.rows, 2, limits.has_states) if limits.reuse else None
    scheduler = Scheduler.of(limits, prefixes, drafts)
    admission = Admission(model.config, limits, takes_features=True)
    seen: dict[tuple[int, int], PromptImages | PromptSound] = {}
    results: list[Tensor | None] = [None] * len(given)
    left = list(range(len(given)))
    dropped = {number for number in left if rng.random() < 0.15}
    steps: list[Step] = []
    while left or not scheduler.is_idle:
        while left and rng.random() < 0.4:
            number = left.pop(0)
            options = {key: value for key, value in given[number].items() if key != "seed"}
            options, images = admission.separate_images(options)
            request = Request(number, "generate", (), options, given[number]["seed"], images=images)
            calls[number] = prepare(model, request)
            seen |= {(number, each.row): each for each in media_of_rows(images, model.config)}
            for row in calls[number].rows:
                scheduler.add(row)
        for number in [number for number in calls if number in dropped and rng.random() < 0.3]:
            scheduler.drop(lambda row, number=number: row.number == number)  # type: ignore[misc]
            del calls[number]
        steps.append(scheduler.plan(0))
        assert Step.decode(steps[-1].encode()) == steps[-1]
        rows = list(scheduler.rows)
        assert len(rows) <= limits.rows and (seen or len(steps[-1].chunk) <= limits.chunk or not limits.splits)
        if steps[-1].begins and steps[-1].encodes:
            runner.images = seen[steps[-1].number, steps[-1].row]
        logits_BV = runner.run(steps[-1])
        some = rows[: len(steps[-1].tokens)] or rows[len(rows) - steps[-1].joining :]
        assert (logits_BV is None) == (not some)
        if logits_BV is not None and steps[-1].drafts:
            for going, logits in going_on(some, logits_BV, steps[-1].drafts):
                take([some[index] for index in going], logits, table)
        elif logits_BV is not None:
            take(some, logits_BV, table)
        for number in [number for number, call in calls.items() if call.ended]:
            results[number] = calls.pop(number).result()
    return results, steps


def take(rows: list[Any], logits_BV: Tensor, table: TokenTable) -> None:
    """Let rows take their tokens."""
    for row, logits_V, token in zip(rows, logits_BV, choose_tokens(rows, logits_BV, table), strict=True):
        assert not isinstance(token, Exception)
        row.take(logits_V) if token is None else row.take_token(token)


def differences(
    name: str,
    variant: str,
    folder: Any,
    sizes: dict[str, int],
    given: list[dict[str, Any]],
    expected: Any,
    seed: int,
    limits: BatchLimits = LIMITS,
    parts: bool = False,
) -> list[str]:
    """On a rank, list the calls of a class with unexpected results.

    Args:
        parts: the rows are in several parts.
    """
    from oslo_models import registry

    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(folder, dtype=torch.float64, **sizes).eval()
    with lifted_casts(), short_parts() if parts else nullcontext():
        found = together(model, given, random.Random(seed), limits, expected)
    assert sum(result is not None for result in found) >= len(found) // 2
    return [
        f"{number}: {mine.tolist()} instead of {right.tolist()}"
        for number, (mine, right) in enumerate(zip(found, expected, strict=True))
        if mine is not None and not torch.equal(mine, right)
    ]


def without_ties(config: Any) -> Any:
    """Let the tokens of a row not depend on other rows, and return the configuration.

    Indexers have so many heads that no two keys have the score 0. Inkling scales no queries.
    """
    text = config.get_text_config(decoder=True)
    if hasattr(text, "index_topk") and has_index(config):
        text.index_n_heads = 24
    if text.model_type == "inkling_text":
        text.log_scaling_n_floor = 64
    return config


def checked(
    variant: str, folder: Any, seed: int, count: int, name: str | None = None, **changes: Any
) -> tuple[str, list[dict[str, Any]], list[Tensor]]:
    """Save a model; return its class, calls, and the answers of plain transformers to each call alone.

    Args:
        name: of the class. Default: the first one that generates text.
    """
    config = without_ties(zoo.config(variant, **changes))
    name = name or encoder_decoder(variant) or head(variant, config)
    reference = reference_model(name, config, seed, torch.float64).eval()
    reference.save_pretrained(folder)
    given, config = requests(random.Random(seed), count), reference.config
    if config.is_encoder_decoder:  # padding of an encoder is on the right
        padded = [{key: each[key].flip(1) for key in ("input_ids", "attention_mask")} for each in given]
        given = [{**each, **own} for each, own in zip(given, padded, strict=True)]
    if reason_against_padding(config) is not None:  # padded calls do not join
        given = [{**each, "attention_mask": torch.ones_like(each["attention_mask"])} for each in given]
    with lifted_casts():
        expected = [alone(reference, each) for each in given]
    return name, given, expected


def compare(
    pool: Any,
    variant: str,
    folder: Path,
    seed: int,
    count: int = 12,
    limits: BatchLimits = LIMITS,
    parts: bool = False,
    name: str | None = None,
    **sizes: int,
) -> None:
    """Compare calls of a class in the batch with plain transformers; all ranks make the same schedule."""
    name, calls, expected = checked(variant, folder, seed, count, name)
    ranks = sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
    for found in pool.run(ranks, differences, name, variant, folder, sizes, calls, expected, seed, limits, parts):
        assert found == []
