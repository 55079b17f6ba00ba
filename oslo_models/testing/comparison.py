"""For tests of your own architecture: compares a sharded model with the full model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oslo_models.compat.tensor_parallel.api import tensor_parallel
from oslo_models.sharding.model_protocol import TransformersModel
from oslo_models.sharding.plan import Plan


def assert_same_as_one_process(
    model: PreTrainedModel,
    batch: Mapping[str, Any],
    plan: Plan | Callable[[Any], Plan] | None = None,
    tensor_parallel_size: int = 2,
    tolerance: float = 1e-6,
) -> None:
    """Compare outputs and gradients of a sharded model and the full model, in float64 and without a launcher.

    Ranks are threads of this process (`tensor_parallel`), on the CPU. Both models get the weights of ``model`` plus
    noise, because errors could hide behind zero biases. Dropout is off.

    Args:
        model: a small full model on the CPU; it is not changed.
        batch: arguments of its ``forward``, preferably with labels.
        plan: as with `initialize`.
        tensor_parallel_size: the number of ranks. A number that does not divide the sizes of the model tests the most.
        tolerance: the largest allowed difference. transformers computes some steps in float32 for every dtype, so even
            equal models differ by 1e-8.

    Raises:
        AssertionError: an output or gradient differs. The message lists the largest difference of each.
        ValueError: the plan does not fit the model.
    """
    full = copy.deepcopy(model).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in full.parameters():
            param += 0.1 * torch.randn(param.shape, generator=generator, dtype=param.dtype)
    sharded = tensor_parallel(full, ["cpu"] * tensor_parallel_size, gather_logits=True, plan=plan)
    given = {key: value.double() if _is_floating(value) else value for key, value in batch.items()}
    right, found = _step(full, given), _step(sharded, given)
    lines = [f"output {key}: {_difference(found.get(key), value)}" for key, value in right.items()]
    gradients = {name: param.grad for name, param in full.named_parameters(remove_duplicate=False)}
    for rank, part in enumerate(sharded.parts):
        for name, param in part.named_parameters(remove_duplicate=False):
            gradient = gradients[name]
            expected = None if gradient is None else part.layouts[name].shard(gradient, rank)
            lines.append(f"gradient of {name} on rank {rank}: {_difference(param.grad, expected)}")
    wrong = [line for line in lines if not float(line.rpartition(": ")[2]) <= tolerance]
    if wrong:
        raise AssertionError(
            f"{type(model).__name__} over {tensor_parallel_size} ranks differs from the full model:\n  "
            + "\n  ".join(wrong)
        )


def _step(model: TransformersModel, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Run a forward and a backward pass, from the loss if any, else from all outputs. Return the outputs."""
    output = model(**batch)
    found = dict(_tensors(output))
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if loss is None:
        loss = torch.stack(
            [(value * torch.arange(value.numel()).cos().view_as(value)).sum() for value in found.values()]
        )
    loss.sum().backward()
    return {key: value.detach() for key, value in found.items()}


def _tensors(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a nested output, each with its path."""
    if _is_floating(output):
        yield path, output
    elif isinstance(output, (Mapping, tuple, list)):
        for key, value in output.items() if isinstance(output, Mapping) else enumerate(output):
            yield from _tensors(value, f"{path}.{key}" if path else str(key))


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest difference of two tensors; infinity if one is missing or the shapes differ."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if found.shape != expected.shape:
        return float("inf")
    return (found - expected).abs().max().item() if found.numel() else 0.0
