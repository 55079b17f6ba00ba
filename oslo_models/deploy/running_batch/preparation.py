"""Prepares the rows of calls with the settings that transformers' `generate` derives before its first forward.

Legend:
    L: tokens, or positions of the encoder.
    D: size of a hidden state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from oslo_models.deploy.decoding import Decoding
from oslo_models.deploy.running_batch.plain_settings import PlainSettings
from oslo_models.deploy.running_batch.prompt_sounds import media_of_rows, reads_sounds
from oslo_models.deploy.running_batch.row import Call, Row
from oslo_models.deploy.running_batch.row_adapters import ModelAdapters
from oslo_models.deploy.running_batch.sampling import warp_of
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.pipeline.window_encoding import WindowEncoding


def prepare(
    model: ShardedModel, request: Any, known: PlainSettings | None = None, adapters: ModelAdapters | None = None
) -> Call:
    """Return the call of a request, with all settings that `generate` prepares before its first forward.

    Args:
        known: settings of former calls of the same model.
        adapters: of the model.

    Raises:
        IndexError: a prompt has a token outside the vocabulary.
        ValueError: see `ModelAdapters.numbers`.
        Exception: `generate` rejects its arguments.
    """
    kwargs = dict(request.kwargs)
    decoding: Decoding | None = kwargs.pop("decoding", None)
    ids_BL = kwargs.pop("input_ids", None)
    ids_BL = kwargs.pop("inputs", None) if ids_BL is None else ids_BL
    mask_BL = kwargs.pop("attention_mask", None)
    known = known or PlainSettings(model)
    vocabulary = known.vocabulary
    if reads_sounds(model.config):
        return _prepare_sounds(model, request, kwargs, decoding, known, adapters)
    images = {each.row: each for each in media_of_rows(request.images, model.config)}
    rows, prompts = [], ids_BL.tolist()
    numbers = (adapters or ModelAdapters(model)).numbers(kwargs.pop("adapter_names", None), len(prompts))
    for row, prompt in enumerate(prompts):
        _check_tokens("input_ids", prompt, vocabulary)
        given = {"input_ids": ids_BL[row : row + 1].long(), **kwargs}
        if mask_BL is not None:
            given["attention_mask"] = mask_BL[row : row + 1]
        own = {"images": images.get(row), "adapter": numbers[row]}
        rows.append(_make_row(model, request, given, prompt, decoding, known, own))
    return Call(request.number, request.stream, rows)


def _prepare_sounds(
    model: ShardedModel,
    request: Any,
    kwargs: dict[str, Any],
    decoding: Decoding | None,
    known: PlainSettings,
    adapters: ModelAdapters | None,
) -> Call:
    """Return the call of a request with sounds. Its prompts are the first tokens of the decoder."""
    sounds, first_BL = media_of_rows(request.images, model.config), kwargs.pop("decoder_input_ids", None)
    numbers = (adapters or ModelAdapters(model)).numbers(kwargs.pop("adapter_names", None), len(sounds))
    rows = []
    for row, sound in enumerate(sounds):
        given = dict(kwargs)
        if first_BL is not None:
            _check_tokens("decoder_input_ids", first_BL[row].tolist(), known.vocabulary)
            given["decoder_input_ids"] = first_BL[row : row + 1].long()
        states_1LD = torch.empty(1, sound.encoder_positions, 0)
        ids_1L, prompt, settings = _prepare_row(model, request, given, decoding, states_1LD)
        own = {"images": sound, "adapter": numbers[row], "tenant": request.tenant}
        rows.append(Row(request.number, ids_1L, prompt, request.seed, settings, known.device, **own))
    return Call(request.number, request.stream, rows, request.goes_on)


def _check_tokens(name: str, tokens: list[int], vocabulary: int) -> None:
    """Raise ``IndexError`` if a token is outside the vocabulary."""
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        wrong = next(token for token in tokens if not 0 <= token < vocabulary)
        raise IndexError(f"index out of range: {name} has the token {wrong}; the vocabulary has {vocabulary}")


def rows_of_prompt(
    model: ShardedModel,
    prompt: list[int],
    seeds: Sequence[tuple[int, int]],
    kwargs: dict[str, Any],
    known: PlainSettings,
    keeps_logprobs: bool = False,
) -> list[Row]:
    """Return rows with the same prompt, each with its number and seed from ``seeds``.

    Args:
        kwargs: arguments of `generate`.
        known: settings of former rows of the same model.
        keeps_logprobs: see `Row`.
    """
    encodes = model.config.is_encoder_decoder
    given = {"input_ids": torch.tensor([prompt[encodes:]]), **kwargs}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    key = known.key(given)
    ids_BL, settings = torch.tensor([prompt[:1]]) if encodes else given["input_ids"], known.find(key, prompt)
    if settings is None:
        ids_BL, _, settings = _prepare_row(model, None, given, None)
        known.keep(key, settings)
    processors, *others = settings
    is_stateless = warp_of(processors) is not None
    rows = []
    for number, seed in seeds:
        own = processors if is_stateless else copy.deepcopy(processors)
        rows.append(Row(number, ids_BL, prompt, seed, (own, *others), known.device, keeps_logprobs))
    return rows


def _make_row(
    model: ShardedModel,
    request: Any,
    given: dict[str, Any],
    prompt: list[int],
    decoding: Decoding | None,
    known: PlainSettings,
    own: dict[str, Any],
) -> Row:
    """Make a row. Reuse the settings of a former row if `generate` would prepare the same ones.

    Args:
        own: further arguments of `Row`.
    """
    key = known.key(given) if decoding is None else None
    ids_BL, settings = given["input_ids"], known.find(key, prompt)
    if settings is None:
        ids_BL, prompt, settings = _prepare_row(model, request, given, decoding)
        known.keep(key, settings)
    elif model.config.is_encoder_decoder:
        ids_BL = settings[2]._decoder_start_token_tensor.reshape(1, 1).cpu()
        prompt = [int(ids_BL), *prompt]
    return Row(request.number, ids_BL, prompt, request.seed, settings, known.device, tenant=request.tenant, **own)


def _prepare_row(
    model: ShardedModel,
    request: Any,
    given: dict[str, Any],
    decoding: Decoding | None,
    states_1LD: Tensor | None = None,
) -> tuple[Tensor, list[int], Any]:
    """Return the tokens of a row with and without padding, and its settings; see `Row`.

    Args:
        states_1LD: a tensor in the shape of an encoded sound.
    """
    prepared: list[tuple[Tensor, list[int], Any]] = []
    hears = states_1LD is not None
    encodes = model.config.is_encoder_decoder and not hears

    def capture(
        model: ShardedModel,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **rest: Any,
    ) -> Any:
        """Record the prepared arguments, in place of transformers' decoding loop."""
        mask_BL = rest.get("attention_mask")
        ids_BL = given["input_ids"].to(input_ids.device) if encodes else input_ids
        prompt = ids_BL[0] if mask_BL is None or hears else ids_BL[0, mask_BL[0].bool()]
        front = [] if decoding is None else decoding.processors()
        logits_processor[:0] = front
        scored = decoding.scored if decoding is not None and decoding.logprobs is not None and request.stream else None
        settings = (logits_processor, stopping_criteria, generation_config, scored)
        prepared.append((input_ids, [*(input_ids[0].tolist() if encodes else ()), *prompt.tolist()], settings))
        return input_ids

    if encodes:
        states_1LD = torch.empty(*given["input_ids"].shape, 0)
    if states_1LD is not None:  # else `generate` would run the encoder
        given = {**given, "encoder_outputs": BaseModelOutput(last_hidden_state=states_1LD.to(model.device))}
    # Whisper's own `generate` runs in the application, see `windows`
    generate = partial(WindowEncoding.generate, model) if isinstance(model, WindowEncoding) else model.generate
    with model.generating():
        generate(**{**_on_device(given, model.device), "use_cache": False}, custom_generate=capture)
    return prepared[0]


def _on_device(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
