"""Training with DDP, FSDP2, autocast and loss scaling, activation checkpointing, clipping, accumulation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from oslo_models import registry
from oslo_models.distributed.sharded_tensor import without_override

from support import zoo
from support.float64 import lifted_casts
from support.long_masks import by_blocks
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_gradients,
    full_parameters,
    parallel_model,
    reference_model,
    reference_step,
    shard_differences,
    train,
)

Weights = dict[str, Tensor]
Batch = dict[str, Tensor]


# Data parallel --------------------------------------------------------------------------------------------------------


def joined(name: str, config: PreTrainedConfig, seed: int) -> Batch:
    """Return a batch with equally many labels in even and odd rows, so that both means have the same weight."""
    one, two = (zoo.batch(name, config, seed + part) for part in range(2))
    counts = one["labels"] != -100
    two["labels"] = torch.where(counts, two["labels"].clamp(min=0), -100)
    return {key: torch.stack([one[key], two[key]], 1).flatten(0, 1) for key in one}


def with_ddp(model: Any) -> Any:
    return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())


def with_fsdp2(model: Any) -> Any:
    mesh = model.mesh.device_mesh["dp"]
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Callable[[Any], Any]] = {"DDP": with_ddp, "FSDP2": with_fsdp2}


def check_data_parallel(
    wrapper: str,
    name: str,
    config: PreTrainedConfig,
    weights: Weights,
    batches: list[Batch],
    losses: list[float],
    norms: list[float],
    trained: Weights,
) -> None:
    """On each of 2 x 2 ranks: training on half of each batch matches one process on the whole batch."""
    model = parallel_model(name, config, weights, 2)
    dp = model.mesh.dp
    assert dp.size == 2
    wrapped = WRAPPERS[wrapper](model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    lines = []
    for batch, expected_loss, expected_norm in zip(batches, losses, norms, strict=True):
        own = {
            key: value[dp.rank :: dp.size].contiguous() for key, value in batch.items()
        }  # as DistributedSampler does
        optimizer.zero_grad()
        with lifted_casts():
            loss = wrapped(**own).loss
            loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        mean = loss.detach() / dp.size
        dist.all_reduce(mean, group=dp.group)
        lines += differences("loss", mean, torch.tensor(expected_loss, dtype=mean.dtype), TOLERANCE)
        lines += differences("norm", torch.as_tensor(norm), torch.tensor(expected_norm, dtype=norm.dtype), TOLERANCE)
    own = dict(model.named_parameters())
    if wrapper == "FSDP2":
        assert all(type(param.data).__name__ == "DTensor" for param in own.values())
        own = {key: param.full_tensor() for key, param in own.items()}
    lines += shard_differences(model, "trained", own, trained, TOLERANCE)
    assert not lines, "\n".join(lines)


def check_replicas(pool: Pool, variant: str, wrapper: str, seed: int, *through: Callable[..., Any]) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    weights = full_parameters(model)
    batches = [joined(name, config, seed + 2 * step) for step in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        with lifted_casts():
            loss = model(**batch).loss
            loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    check, *more = *through, check_data_parallel
    pool.run(4, check, *more, wrapper, name, config, weights, batches, losses, norms, full_parameters(model))


@pytest.mark.drawn(5)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "llama-one-kv"])
def test_training_under_ddp_and_fsdp2_matches_one_process(pool: Pool, variant: str, wrapper: str, seed: int) -> None:
    """With clipping, which has to count parameters sharded over both axes."""
    check_replicas(pool, variant, wrapper, seed)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_replicas_with_attention_by_blocks_match_one_process(pool: Pool, wrapper: str, seed: int) -> None:
    check_replicas(pool, "llama", wrapper, seed, by_blocks)


# Half precision -------------------------------------------------------------------------------------------------------


def train_in_half_precision(
    name: str, config: PreTrainedConfig, seed: int, dtype: torch.dtype
) -> tuple[list[float], dict[str, list[Tensor]]]:
    """Return the losses of five steps, and the replicated parts of parameters by name and position."""
    cls: Any = registry.find(name)
    model = cls.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed)
    batch = zoo.batch(name, config, seed, torch.float32)
    optimizer, scaler = torch.optim.AdamW(model.gpu_parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(5):
        with torch.autocast("cpu", dtype=dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    shared = {}
    for key, param in model.named_parameters():
        layout = model.layouts[key]
        if layout.dim is None or layout.overlaps:
            shared[f"{key} {layout.ranges and layout.ranges[model.mesh.tp.rank]}"] = param.detach().clone()
    return losses, shared


@pytest.mark.drawn(5)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "llama-one-kv"])
def test_autocast_training_matches_one_process(pool: Pool, variant: str, dtype: torch.dtype, seed: int) -> None:
    """Autocast and loss scaling, with dropout: the loss falls, and replicated parameters stay bitwise equal."""
    arguments = (zoo.lm_head(variant), zoo.config(variant, dropout=0.05), seed, dtype)
    (losses, shared), (other_losses, other_shared) = pool.run(2, train_in_half_precision, *arguments)
    assert losses == other_losses
    assert losses[-1] < losses[0]
    assert shared
    assert shared.keys() == other_shared.keys()
    assert [key for key in shared if not torch.equal(shared[key], other_shared[key])] == []


class _Overflow(torch.autograd.Function):
    """Identity with an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.full_like(grad, float("inf"))


def overflow(layer: Any, _: Any, out: Tensor) -> Tensor:
    with without_override():  # a sum of a shard is a collective
        return out + 0 * _Overflow.apply(layer.bias).sum()


def overflow_on_one_rank(seed: int, wrapper: str) -> tuple[list[float], list[bool]]:
    """Return three steps' loss scales, and whether each step ran; rank 1 overflows in the second step."""
    cls: Any = registry.find("GPT2LMHeadModel")
    config = zoo.config("gpt2")
    model = cls.from_config_with_parallel(config, tensor_parallel_size=2, seed=seed)
    wrapped = WRAPPERS.get(wrapper, lambda model: model)(model)
    batch = zoo.batch("GPT2LMHeadModel", config, seed, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    layer = model.transformer.h[0].mlp.c_fc  # its bias is sharded: no other rank sees this gradient
    scales, stepped = [], []
    for step in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        handles = []
        if step == 1 and dist.get_rank() == 1:
            handles.append(layer.register_forward_hook(overflow))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = wrapped(**batch).loss
        scaler.scale(loss).backward()
        for handle in handles:
            handle.remove()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(any(bool((old != new).any()) for old, new in zip(before, model.parameters(), strict=True)))
    return scales, stepped


@pytest.mark.parametrize(("n", "wrapper"), [(2, "alone"), (4, "DDP"), (4, "FSDP2")])
def test_grad_scaler_skips_a_step_on_all_ranks_after_an_overflow_on_one(
    pool: Pool, n: int, wrapper: str, seed: int
) -> None:
    for result in pool.run(n, overflow_on_one_rank, seed, wrapper):
        assert result == ([8.0, 4.0, 4.0], [True, False, True])


# Checkpointing, clipping, accumulation --------------------------------------------------------------------------------


def check_checkpointing(name: str, config: PreTrainedConfig, weights: Weights, batch: Batch) -> None:
    """On each of two ranks: loss and gradients are bitwise equal with and without recomputation, dropout included.

    In float32: the mode that lifts casts is not active while the backward pass recomputes.
    """
    lines = []
    results: dict[str, tuple[Tensor, Any, Tensor]] = {}
    for mode in ("plain", "default", "reentrant", "not reentrant"):
        model = parallel_model(name, config, weights, 2, torch.float32)
        if mode == "default":
            model.gradient_checkpointing_enable()
        elif mode != "plain":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
        torch.manual_seed(5)
        loss = model(**batch).loss
        loss.backward()
        results[mode] = loss.detach(), full_gradients(model), torch.rand(3)
    loss, gradients, drawn = results.pop("plain")
    for mode, (other_loss, other_gradients, other_drawn) in results.items():
        # Reentrant checkpointing sums the gradient of the encoder output over decoder blocks in another order.
        # A reentrant block begins at a leaf with a separate copy for each reader, which also reorders sums.
        tolerance = 1e-6 if mode == "reentrant" else 0
        lines += differences(f"{mode}: loss", other_loss, loss, 0)
        lines += differences(f"{mode}: what is drawn next", other_drawn, drawn, 0)
        for key, gradient in gradients.items():
            lines += differences(f"{mode}: gradient of {key}", other_gradients[key], gradient, tolerance)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", [*zoo.FOUNDING, "gpt2-cross", "llama-one-kv"])
def test_gradient_checkpointing_matches_one_process(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant, dropout=0.3, use_cache=False)
    batch = zoo.batch(name, config, seed, torch.float32)
    weights = full_parameters(reference_model(name, config, seed, torch.float32))
    pool.run(2, check_checkpointing, name, config, weights, batch)


Clipped = dict[tuple[float, float], tuple[Tensor, dict[str, Tensor | None]]]


def check_clipping(
    name: str, config: PreTrainedConfig, weights: Weights, batch: Batch, expected: Clipped, n: int
) -> None:
    model = parallel_model(name, config, weights, n)
    lines = []
    for (max_norm, norm_type), (norm, gradients) in expected.items():
        model.zero_grad()
        with lifted_casts():
            model(**batch).loss.backward()
        found = model.clip_grad_norm_(max_norm, norm_type)
        lines += differences(f"norm {norm_type}", found, norm, TOLERANCE)
        own = {key: param.grad for key, param in model.named_parameters()}
        lines += shard_differences(model, f"clipped to {max_norm} in norm {norm_type}:", own, gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("variant", "n"),
    [(variant, n) for variant in zoo.FOUNDING for n in (2, 3)] + [("llama-one-kv", 2), ("llama-untied", 3)],
)
def test_clip_grad_norm_matches_one_process(pool: Pool, variant: str, n: int, seed: int) -> None:
    """Every sharded parameter counts in full, and every replicated parameter counts once."""
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model, batch = reference_model(name, config, seed), zoo.batch(name, config, seed)
    weights = full_parameters(model)
    expected: Clipped = {}
    for norm_type in (2.0, 1.0, 3.0, float("inf")):
        for max_norm in (1e-2, 1e6):
            model.zero_grad()
            with lifted_casts():
                model(**batch).loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            gradients = {key: None if grad is None else grad.clone() for key, grad in full_gradients(model).items()}
            expected[max_norm, norm_type] = norm, gradients
    pool.run(n, check_clipping, name, config, weights, batch, expected, n)


def accumulate(model: Any, batches: list[Batch]) -> None:
    with lifted_casts():
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()


def check_accumulation(
    name: str, config: PreTrainedConfig, weights: Weights, batches: list[Batch], expected: Mapping[str, Tensor | None]
) -> None:
    model = parallel_model(name, config, weights, 2)
    accumulate(model, batches)
    own = {key: param.grad for key, param in model.named_parameters()}
    lines = shard_differences(model, "accumulated", own, expected, TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_gradient_accumulation_matches_one_process(pool: Pool, variant: str, seed: int) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    model = reference_model(name, config, seed)
    batches = [zoo.batch(name, config, seed + i) for i in range(3)]
    accumulate(model, batches)
    pool.run(2, check_accumulation, name, config, full_parameters(model), batches, full_gradients(model))


def check_side_by_side(steps: list[Step], sizes: list[int]) -> None:
    """Run several models in the same processes, all forward and then all backward; each matches a separate run."""
    models = [parallel_model(step.name, step.config, step.weights, n) for step, n in zip(steps, sizes, strict=True)]
    models.append(copy.deepcopy(models[0]))
    steps = [*steps, steps[0]]
    lines = []
    with lifted_casts():
        losses = [model(**step.batch).loss for model, step in zip(models, steps, strict=True)]
        for loss in losses:
            loss.backward()
    for index, (model, step, loss) in enumerate(zip(models, steps, losses, strict=True)):
        lines += differences(f"loss {index}", loss.detach(), step.value, TOLERANCE)
        own = {key: param.grad for key, param in model.named_parameters(remove_duplicate=False)}
        lines += shard_differences(model, f"model {index}: gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


def test_two_models_in_one_process_do_not_interfere(pool: Pool, seed: int) -> None:
    variants = {"gpt2": 2, "llama": 2, "t5": 4, "gpt2-untied": 1, "llama-one-kv": 4}
    steps = [reference_step(zoo.lm_head(variant), zoo.config(variant), seed) for variant in variants]
    pool.run(4, check_side_by_side, steps, list(variants.values()))


def test_training_script_for_one_process_runs_unchanged(seed: int) -> None:
    """The training loop of the tests above lowers the loss."""
    name, config = zoo.lm_head("gpt2"), zoo.config("gpt2")
    batch = zoo.batch(name, config, seed)
    losses = train(reference_model(name, config, seed), [batch] * 4, "AdamW")
    assert losses == sorted(losses, reverse=True)
