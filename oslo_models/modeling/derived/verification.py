"""Compares outputs, gradients and buffers of a sharded model with the unsharded model, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.layers.full_weights import model_code
from oslo_models.layers.sharded_activation import gathered
from oslo_models.modeling.apply_plan import apply_plan, layouts_of
from oslo_models.modeling.derived.derivation import Call
from oslo_models.sharding.layout import Layout
from oslo_models.sharding.plan import Plan

TOLERANCE = 1e-5
"""Relative tolerance: transformers computes some steps of a float64 model in float32. Wrong plans differ by about 1."""

Sharding = Callable[[Any, ParallelMesh], dict[str, Layout]]
"""A function that shards a module in place without a plan. Returns the layouts."""


@torch.no_grad()
def shard_module(model: nn.Module, plan: Plan | Sharding, mesh: ParallelMesh) -> dict[str, Layout]:
    """Shard a module in place and return its layouts. Tied parameters stay tied."""
    if not isinstance(plan, Plan):
        return plan(model, mesh)
    layouts = layouts_of(model, plan, "", {}, mesh.tp.size)
    if mesh.tp.size == 1:
        return layouts
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    apply_plan(model, plan, "", {}, mesh, layouts)
    for first, *others in names.values():
        for name in others:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = model.get_parameter(first)
    return layouts


def floating_tensors(output: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors in an output, each with its path."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield path, output
    elif isinstance(output, dict):
        for key, value in output.items():
            yield from floating_tensors(value, f"{path}.{key}")
    elif isinstance(output, (tuple, list)):
        for index, value in enumerate(output):
            yield from floating_tensors(value, f"{path}[{index}]")


def _step(model: nn.Module, call: Call, seed: int) -> dict[str, Any]:
    """Run a forward pass, and a backward pass if gradients are enabled. Return outputs, gradients and buffers."""
    torch.manual_seed(seed)
    model.zero_grad()
    with model_code():
        seen = dict(floating_tensors(gathered(call(model))))
    weighted = [
        (x * torch.arange(x.numel(), dtype=x.dtype).cos().view_as(x)).sum() for x in seen.values() if x.requires_grad
    ]
    if weighted:
        torch.stack(weighted).sum().backward()
    found: dict[str, Any] = {name: x.detach() for name, x in seen.items()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return found | {f"buffer {name}": x.clone() for name, x in model.named_buffers() if x.is_floating_point()}


def differences(probe: nn.Module, plan: Plan | Sharding, calls: Sequence[Call], n: int, seed: int) -> list[str]:
    """List the differences between a model sharded over ``n`` ranks and the full model, one per line.

    Args:
        probe: the full model, in float64 on the CPU, without dropout.
        plan: the sharding plan.
        calls: functions that call the model, each used in training and in evaluation mode.
        seed: the seed for random numbers that the model draws.
    """
    threads = ThreadGroup([torch.device("cpu")] * n)
    parts = [copy.deepcopy(probe) for _ in range(n)]
    shards = [shard_module(part, plan, ParallelMesh.of_thread(threads, rank)) for rank, part in enumerate(parts)]
    layouts = shards[0]
    probe = copy.deepcopy(probe)
    lines: list[str] = []
    for call in calls:
        for training in (True, False):
            for model in (probe, *parts):
                model.train(training)
            with torch.set_grad_enabled(training):
                expected = _step(probe, call, seed)
                try:
                    found = threads.run(lambda rank, call=call: _step(parts[rank], call, seed))  # type: ignore[misc]
                except Exception as error:  # noqa: BLE001  the model's code, or torch, does not take what it gets
                    return [*lines, f"{type(error).__name__}: {str(error)[:300]}"]
            for rank, own in enumerate(found):
                lines += _compare(own, expected, layouts, rank)
    return lines


def _compare(own: dict[str, Any], expected: dict[str, Any], layouts: dict[str, Layout], rank: int) -> Iterator[str]:
    gradients = [_scale(x) for name, x in expected.items() if name.startswith("gradient of ") and x is not None]
    noise = 1e-9 * max(gradients, default=0.0)  # some gradients are pure rounding errors, e.g. of key biases
    if own.keys() != expected.keys():
        yield f"names: {sorted(own.keys() ^ expected.keys())}"
    for name in own.keys() & expected.keys():
        value, right = own[name], expected[name]
        is_sharded = name.startswith(("gradient of ", "buffer "))
        layout = layouts.get(name.removeprefix("gradient of ").removeprefix("buffer ")) if is_sharded else None
        if right is None or value is None:
            if (value is None) != (right is None):
                yield f"{name} of rank {rank}: {'none' if value is None else 'one'}"
            continue
        if layout is not None:
            right = layout.shard(right, rank)
        if value.shape != right.shape:
            yield f"{name} of rank {rank}: shape {tuple(value.shape)} instead of {tuple(right.shape)}"
        elif not torch.allclose(value, right, rtol=TOLERANCE, atol=TOLERANCE * _scale(right) + noise, equal_nan=True):
            yield f"{name} of rank {rank}: differs by {(value - right).abs().max():.1e}"


def _scale(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
