"""Models that `tensor_parallel` shards over threads of one process."""

from __future__ import annotations

from typing import Any

import oslo_models

from support import zoo
from support.reference import (
    TOLERANCE,
    differences,
    loss_or_all_outputs,
    reference_model,
    reference_step,
    shard_differences,
    take_step,
)


def tensor_parallel_model(model: Any, n: int = 2, **options: Any) -> Any:
    """Shard the model over ``n`` ranks on the CPU."""
    return oslo_models.tensor_parallel(model, ["cpu"] * n, **options)


def transformers_model(variant: str, seed: int, dropout: float = 0.0, **options: Any) -> Any:
    """Return the language model of a variant from transformers."""
    return reference_model(zoo.lm_head(variant), zoo.config(variant, dropout), seed, **options)


def check_tensor_parallel_step(name: str, variant: str, n: int, seed: int, **options: Any) -> None:
    """Compare outputs, loss, input gradients and, on each rank, parameter gradients with transformers."""
    config = zoo.config_of(name, zoo.config(variant))
    step = reference_step(name, config, seed)
    model = tensor_parallel_model(reference_model(name, config, seed), n, gather_logits=True, **options)
    outputs, value, input_gradients = take_step(model, step.batch, loss_or_all_outputs)
    lines = [] if outputs.keys() == step.outputs.keys() else [f"outputs: {[*outputs]} instead of {[*step.outputs]}"]
    for path in outputs.keys() & step.outputs.keys():
        lines += differences(f"output {path}", outputs[path], step.outputs[path], TOLERANCE)
    lines += differences("value", value, step.value, TOLERANCE)
    for key, gradient in input_gradients.items():
        lines += differences(f"gradient of input {key}", gradient, step.input_gradients[key], TOLERANCE)
    for part in model.parts:
        own = {name: param.grad for name, param in part.named_parameters(remove_duplicate=False)}
        lines += shard_differences(part, "gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)
