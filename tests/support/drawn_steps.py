"""Steps of transformers' classes with drawn configurations, for models whose ranks divide the tokens."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from oslo_models import registry

from support import draws, pipelines, zoo
from support.reference import Step, reference_step, saved_step

OF_TEXT = {"input_ids", "attention_mask", "token_type_ids", "labels", "decoder_input_ids", "decoder_attention_mask"}
"""Inputs that have a value for each token."""


def shortened(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Keep the last tokens of each row."""
    tokens = batch["input_ids"].shape[-1]

    def of(value: Any) -> Any:
        dims = [
            dim for dim in (-1, -2) if value.dim() >= -dim and value.shape[dim] == tokens
        ]  # Tapas: seven kinds last
        return value.narrow(dims[0], tokens - length, length).contiguous() if dims else value

    return {key: of(value) for key, value in batch.items()}


def _fit_rules(config: Any, n: int) -> None:
    """Give gated delta rules enough key heads for ``n`` ranks, which they do not divide evenly."""
    text = config.get_text_config()
    if getattr(text, "linear_num_key_heads", n) < n:
        text.linear_num_key_heads, text.linear_num_value_heads = n + 1, 2 * (n + 1)


def drawn_step(
    name: str, model_type: str, seed: int, n: int, length: int | None, folder: Path | None = None
) -> tuple[Step, dict[str, Any], str]:
    """Return the step of transformers' class with a drawn configuration that it can run, and that has enough heads.

    Args:
        n: tensor-parallel or context-parallel ranks, or both together.
        length: tokens of a row, if the batch is of text.
        folder: where to save the model, for pipeline stages. The batch then has rows for micro-batches.
    """
    for drawn in draws.draws(name, model_type, seed):
        _fit_rules(drawn.config, n)
        plan = registry.find(name).plan(drawn.config)  # type: ignore[attr-defined]
        if plan.single_rank_reason or (plan.max_ranks() or n) < n:
            continue
        on_stages = folder is not None and not plan.pipeline.single_stage_reason
        batch = (pipelines if on_stages else zoo).batch(name, drawn.config, seed)
        batch = draws.kind_of_labels(name, drawn.config, batch, seed)
        if length is not None and batch.keys() <= OF_TEXT:
            batch = shortened(batch, length)
        options = {key: value for key, value in drawn.options.items() if key == "attn_implementation"}
        with contextlib.suppress(Exception):  # whatever transformers raises
            if folder is None:
                step = reference_step(name, drawn.config, seed, batch=batch, **options)
            else:
                step = saved_step(name, drawn.config, seed, batch, folder)
            if all(value.isfinite().all() for value in (step.value, *step.gradients.values()) if value is not None):
                return step, options, drawn.text
    pytest.fail(f"transformers can do none of the drawn configurations of {name}")
