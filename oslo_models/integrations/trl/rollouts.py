"""Generates the completions of TRL's trainers in the running batch, if they have the tokens of `generate`.

A row of the running batch leaves after its last token, and equal prompts are computed once, so completions of different
lengths take less time. See *Rollouts* in the benchmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.deploy.generation_limits import settings_of
from oslo_models.deploy.running_batch.admission import (
    bounds,
    reason_against,
    reason_against_padding,
    unsupported_setting,
)
from oslo_models.deploy.running_batch.offline import limits_of
from oslo_models.deploy.running_batch.penalties import Penalty
from oslo_models.deploy.running_batch.plain_settings import PlainSettings
from oslo_models.deploy.running_batch.preparation import rows_of_prompt
from oslo_models.deploy.running_batch.slot_states import has_states
from oslo_models.integrations.accelerator import find_parallel_model
from oslo_models.integrations.trl.head import find_on_mesh
from oslo_models.modeling.base import ParallelModel


@contextmanager
def generating_in_batch(module: Any, keeps_logprobs: bool = False) -> Iterator[list[list[float]]]:
    """Context in which ``generate`` of a sharded model uses the running batch for calls with the same result.

    Args:
        module: the model, with or without wrappers.
        keeps_logprobs: of a model with `use_exact_rollouts`, use the running batch for all calls, and record the
            log-probabilities of the tokens.

    Yields:
        The recorded log-probabilities of each completion.
    """
    model, logprobs = find_on_mesh(module), list[list[float]]()
    keeps_logprobs = keeps_logprobs and model is not None and model.has_exact_rollouts
    # without several ranks, generate is transformers' own; another library, or the caller, may have replaced it
    if model is None or "generate" in vars(model) or not (keeps_logprobs or find_parallel_model(module) is not None):
        yield logprobs
        return
    is_training, own, own_batch = model.training, model.generate, model.generate_batch

    def generate(input_ids: Any = None, attention_mask: Any = None, generation_config: Any = None, **rest: Any) -> Any:
        # the batch itself calls generate with further arguments
        joins = not rest and joins_batch(model, input_ids, attention_mask, generation_config)
        if joins or (keeps_logprobs and not rest):
            return _generate(model, input_ids, attention_mask, generation_config, joins)
        return own(input_ids=input_ids, attention_mask=attention_mask, generation_config=generation_config, **rest)

    def generate_batch(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["continuous_batching_config"] = SimpleNamespace(return_logprobs=True)
        outputs = own_batch(inputs, *args, **kwargs)
        logprobs.extend(each.logprobs for each in outputs.values())
        return outputs

    changed: Any = model
    changed.generate = generate
    if keeps_logprobs:
        changed.generate_batch = generate_batch
    try:
        yield logprobs
    finally:
        del changed.generate
        vars(changed).pop("generate_batch", None)
        if model.training != is_training:  # TRL ends its own continuous batching in training mode
            model.train(is_training)


def joins_batch(model: ParallelModel, input_ids: Any, attention_mask: Any, config: Any) -> bool:
    """Return whether a call of ``generate`` has the same tokens in the running batch, and is not slower there.

    Rows of the batch have no padding and begin together. So no logits processor may read the tokens of a row, and all
    rows have to fit. A fused model has faster decoding steps in ``generate``.

    Args:
        input_ids, attention_mask: [rows, length].
        config: a ``GenerationConfig``.
    """
    if not isinstance(input_ids, Tensor) or not isinstance(attention_mask, Tensor) or config is None:
        return False
    assert model.mesh is not None
    if model._fusion is not None or model.mesh.has_experts_over_replicas or reason_against(model.config) is not None:
        return False
    # generate pads its batch, and the batch computes each prompt without padding
    if has_states(model.config) or reason_against_padding(model.config) is not None:
        return False
    given = {"generation_config": config}
    setting = settings_of(given, model.generation_config)
    is_plain = all(setting(name) is None for name in ("max_time", "stop_strings"))
    if not is_plain or setting("max_new_tokens") is None or unsupported_setting(given, model.generation_config):
        return False
    count, length = input_ids.shape
    longest = length + setting("max_new_tokens")
    if any(longest > most for _, most in bounds(model.config)):
        return False
    limits = limits_of(model, count, longest, None)
    if not 1 < count <= limits.rows or _has_dropout(model):
        return False
    settings = PlainSettings(model)
    (row,) = rows_of_prompt(model, _prompts(input_ids[:1], attention_mask)[0], [(0, 0)], given, settings)
    return row.warp is not None and row.warp.penalty == Penalty()


def _has_dropout(model: nn.Module) -> bool:
    """Return whether ``generate`` would drop activations, as it does in training mode."""
    if not model.training:
        return False
    config: Any = model.config
    rates = [rate for name, rate in vars(config.get_text_config(decoder=True)).items() if "drop" in name]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _prompts(ids_BL: Tensor, mask_BL: Tensor) -> list[list[int]]:
    return [ids_L[mask_L.bool()].tolist() for ids_L, mask_L in zip(ids_BL, mask_BL, strict=False)]


def _generate(model: ParallelModel, ids_BL: Tensor, mask_BL: Tensor, config: Any, common: bool) -> Tensor:
    """Return prompts and new tokens, padded as by ``generate``.

    Args:
        common: draw the tokens as ``generate`` does.
    """
    outputs = model.generate_batch(_prompts(ids_BL, mask_BL), config, common_draws=common)
    new = [torch.tensor(each.generated_tokens, dtype=ids_BL.dtype) for each in outputs.values()]
    pad = settings_of({"generation_config": config}, model.generation_config)("pad_token_id")
    new_BL = nn.utils.rnn.pad_sequence(new, batch_first=True, padding_value=0 if pad is None else pad)
    return torch.cat((ids_BL, new_BL.to(ids_BL.device)), 1)
