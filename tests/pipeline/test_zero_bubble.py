"""The zero-bubble schedule: gradients of 1F1B bit for bit, weight gradients in the bubble, memory, refusals."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

import oslo_models
from oslo_kernels.linear import ONEDNN, has_onednn, trained_product
from oslo_models import registry
from oslo_models.layers import deferred_gradients
from oslo_models.layers.deferred_gradients import DeferredGradients, MicroBatchGradients
from oslo_models.pipeline.schedule import Schedule
from oslo_models.pipeline.stage_runner import StageRunner

from support import pipelines, zoo
from support.pipelines import LM, Batch, Case, case_on_stages, gradient_differences, lm_case, run_micro_batches
from support.pool import Pool
from support.reference import TOLERANCE, differences, reference_model

SCHEDULES = ("1f1b", "zb-h1")
Step = Callable[[Any, Batch], Any]


def make(
    name: str, config: PreTrainedConfig, tp: int, pp: int, dtype: torch.dtype, schedule: str, **options: Any
) -> Any:
    cls: Any = registry.find(name)
    return cls.from_config_with_parallel(config, tp, pp, dtype=dtype, seed=1, schedule=schedule, **options).train()


def plain_step(model: Any, batch: Batch) -> Tensor:
    return run_micro_batches(model, batch, lift=next(model.parameters()).dtype is torch.float64)


@contextmanager
def deferred_counted() -> Iterator[list[int]]:
    """Return the number of weight gradients of each micro-batch that were computed later."""
    counts: list[int] = []
    compute = MicroBatchGradients.compute

    def counted(self: MicroBatchGradients, accumulate: Any) -> None:
        counts.append(len(self._products))
        compute(self, accumulate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroBatchGradients, "compute", counted)
        yield counts


def bits(x: Any) -> Any:
    """Return a plain copy of a result: a tensor, or nothing."""
    return None if x is None else x.detach().as_subclass(Tensor).clone()


def results_of(model: Any, trained: Any, batches: list[Batch], step: Step) -> dict[str, Any]:
    """Return the losses of all batches, the norm and the clipped gradients."""
    found: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        torch.manual_seed(number)  # the same dropout masks
        found[f"loss {number}"] = bits(step(trained, batch))
    found["norm"] = bits(model.clip_grad_norm_(0.5))
    return found | {name: bits(param.grad) for name, param in model.named_parameters()}


def different(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def equal(a: Any, b: Any) -> bool:
        return a is b is None or (a is not None and b is not None and torch.equal(a, b))

    assert found.keys() == expected.keys()
    return [key for key in expected if not equal(found[key], expected[key])]


def unchanged(model: Any) -> Any:
    return model


@dataclass
class Run:
    """Two accumulated batches on stages.

    Attributes:
        prepare: changes the model after construction.
        step: runs a batch.
        ddp: whether replicas train in ``DistributedDataParallel``.
    """

    name: str
    config: PreTrainedConfig
    batches: list[Batch]
    tp: int = 1
    pp: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] = unchanged
    step: Step = plain_step
    ddp: bool = False
    dtype: torch.dtype = torch.float64


def check_same_bits(run: Run) -> None:
    """Train by both schedules. Every loss, norm and gradient is equal bit for bit, and gradients were deferred."""
    found = {}
    for schedule in SCHEDULES:
        model = make(run.name, run.config, run.tp, run.pp, run.dtype, schedule, **run.options)
        trained = run.prepare(model)
        replicas, batches = model.mesh.dp, run.batches
        if run.ddp:
            trained = DistributedDataParallel(trained, process_group=model.mpu.get_data_parallel_group())
            batches = [{key: x[replicas.rank :: replicas.size] for key, x in batch.items()} for batch in run.batches]
        with deferred_counted() as counts:
            found[schedule] = results_of(model, trained, batches, run.step)
        later = schedule == "zb-h1" and model.stage.index > 0
        assert (sum(counts) > 0) == later, (schedule, model.stage.index, counts)
    assert all(x is None or not x.isnan().any() for x in found["1f1b"].values())
    assert not (lines := different(found["zb-h1"], found["1f1b"])), lines


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "gpt2": {},
    "gptj": {},
    "llama": {},
    "llama-one-kv": {"num_hidden_layers": 4},
    "t5": {},
    "deberta-v2": {"num_hidden_layers": 4},  # projections that are called twice
    "bloom": {"n_layer": 4},
    "mixtral": {"num_hidden_layers": 4},
    "qwen3_moe": {"num_hidden_layers": 4},
    "switch_transformers": {"num_layers": 4, "num_decoder_layers": 4},
    "mamba2": {"num_hidden_layers": 4},
}


def batches_of(
    name: str, config: PreTrainedConfig, seed: int, rows: int = 6, dtype: Any = torch.float64
) -> list[Batch]:
    return [pipelines.batch(name, config, seed + 10 * step, rows=rows, dtype=dtype) for step in range(2)]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("tp", "pp", "size"), [(1, 2, 1), (1, 3, 2), (2, 2, 1)])
@pytest.mark.parametrize("variant", FAMILIES)
def test_gradients_equal_1f1b_bit_for_bit(pool: Pool, variant: str, tp: int, pp: int, size: int, seed: int) -> None:
    """Two accumulated batches with dropout, and micro-batches with unequal numbers of labels."""
    config = pipelines.config(variant, 0.1, **FAMILIES[variant])
    name = zoo.main_head(variant)
    run = Run(name, config, batches_of(name, config, seed), tp, pp, {"micro_batch_size": size})
    pool.run(tp * pp, check_same_bits, run)


@pytest.mark.parametrize("size", [1, 2, 6])
def test_any_number_of_micro_batches(pool: Pool, size: int, seed: int) -> None:
    """As many micro-batches as stages, fewer, and one."""
    config = pipelines.config("gpt2", 0.1)
    batches = batches_of(LM["gpt2"], config, seed)
    pool.run(3, check_same_bits, Run(LM["gpt2"], config, batches, 1, 3, {"micro_batch_size": size}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_bits_in_other_dtypes(pool: Pool, variant: str, dtype: torch.dtype, seed: int) -> None:
    config, name = pipelines.config(variant, 0.1), LM[variant]
    batches = batches_of(name, config, seed, dtype=dtype)
    pool.run(2, check_same_bits, Run(name, config, batches, dtype=dtype))


def autocast_step(model: Any, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return run_micro_batches(model, batch, 1024.0, lift=False)


@pytest.mark.parametrize(("variant", "tp"), [("gpt2", 1), ("llama-one-kv", 2), ("t5", 1)])
def test_bits_under_autocast(pool: Pool, variant: str, tp: int, seed: int) -> None:
    config, name = pipelines.config(variant, 0.1), zoo.lm_head(variant)
    batches = batches_of(name, config, seed, dtype=torch.float32)
    run = Run(name, config, batches, tp, step=autocast_step, dtype=torch.float32)
    pool.run(2 * tp, check_same_bits, run)


# Replicas -------------------------------------------------------------------------------------------------------------


def quiet_step(model: Any, batch: Batch) -> Tensor:
    """The first batch without a sum over the replicas."""
    first = not hasattr(model, "has_stepped")
    model.has_stepped = True
    with model.no_sync() if first else nullcontext():
        return plain_step(model, batch)


@pytest.mark.parametrize("step", [plain_step, quiet_step], ids=["in sync", "no_sync"])
@pytest.mark.parametrize(("variant", "size"), [("gpt2", 1), ("t5", 1), ("llama", 3)])
def test_replicas_of_ddp(pool: Pool, variant: str, size: int, step: Step, seed: int) -> None:
    config, name = pipelines.config(variant, 0.1), LM[variant]
    batches = batches_of(name, config, seed)
    run = Run(name, config, batches, options={"micro_batch_size": size}, step=step, ddp=True)
    pool.run(4, check_same_bits, run)


def test_experts_over_replicas(pool: Pool, seed: int) -> None:
    config, name = pipelines.config("qwen3_moe", num_hidden_layers=4), zoo.main_head("qwen3_moe")
    options = {"expert_parallel_size": 2}
    pool.run(4, check_same_bits, Run(name, config, batches_of(name, config, seed), options=options, ddp=True))


def check_replicas(given: Case) -> None:
    """DDP reduces each gradient once, and the result is the gradient of all replicas."""
    model = case_on_stages(given, 1, 2, schedule="zb-h1")
    reduced: list[int] = []

    def noted(bucket: Any) -> Any:
        reduced.append(sum(grad.numel() for grad in bucket.gradients()))
        future: torch.futures.Future[Any] = torch.futures.Future()
        total = bucket.buffer() / model.mesh.dp.size
        torch.distributed.all_reduce(total, group=model.mesh.dp.group)
        future.set_result(total)
        return future

    ddp = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    ddp.register_comm_hook(None, lambda state, bucket: noted(bucket))
    run_micro_batches(ddp, given.batches[0][model.mesh.dp.rank])
    lines = gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    assert sum(reduced) == sum(param.numel() for param in model.parameters())


def test_ddp_reduces_once_after_the_last_micro_batch(pool: Pool, seed: int) -> None:
    pool.run(4, check_replicas, lm_case("gpt2", seed, replicas=2))


# Order and memory -----------------------------------------------------------------------------------------------------

ORDER = {
    (2, 0): "F F B F B F B B",
    (2, 1): "F B F B W F B W F B W W",
    (3, 0): "F F F B F B B B",
    (3, 1): "F F B F B W F B W B W W",
    (3, 2): "F B F B F B W F B W W W",
}
"""Forwards, backwards and weight gradients of four micro-batches by stages and stage."""


@contextmanager
def events_noted() -> Iterator[list[str]]:
    """Return the events of this stage: ``F``, ``B`` at the send of its input gradient, and ``W``."""
    events: list[str] = []
    run, send, compute = StageRunner.__call__, Schedule._send, MicroBatchGradients.compute

    def forward(self: StageRunner, *args: Any) -> Any:
        events.append("F")
        return run(self, *args)

    def sending(self: Schedule, axis: Any, *args: Any) -> None:
        if axis is self.mesh.pp_back:
            events.append("B")
        send(self, axis, *args)

    def computing(self: MicroBatchGradients, *args: Any) -> None:
        events.append("W")
        compute(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRunner, "__call__", forward)
        patch.setattr(Schedule, "_send", sending)
        patch.setattr(MicroBatchGradients, "compute", computing)
        yield events


@contextmanager
def live_counted() -> Iterator[list[int]]:
    """Return the number of micro-batches with activations on this stage, after every forward."""
    seen: list[int] = []
    forward = Schedule._forward

    def counted(self: Schedule, i: int) -> Any:
        output = forward(self, i)
        seen.append(len(self.in_flight) + len(self._deferred or ()))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "_forward", counted)
        yield seen


def check_order(given: Case, pp: int) -> None:
    model = case_on_stages(given, 1, pp, schedule="zb-h1")
    with events_noted() as events, live_counted() as live:
        loss = run_micro_batches(model, given.batches[0][0])
    lines = differences("loss", loss, given.loss[0], TOLERANCE) + gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    assert " ".join(events) == ORDER[pp, model.stage.index]
    assert max(live) == pp, live  # as many as the first stage of 1F1B


@pytest.mark.parametrize("pp", [2, 3])
def test_weight_gradients_follow_the_sends_of_input_gradients(pool: Pool, pp: int, seed: int) -> None:
    pool.run(pp, check_order, lm_case("gpt2", seed), pp)


def check_freed(given: Case) -> None:
    """After the loop, nothing of it is kept. Without gradients, nothing is deferred."""
    model = case_on_stages(given, 1, 2, schedule="zb-h1")
    records: list[MicroBatchGradients] = []
    recording = DeferredGradients.recording

    def noted(self: DeferredGradients, i: int) -> Any:
        mode = recording(self, i)
        records.append(self._recorded[i])
        return mode

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeferredGradients, "recording", noted)
        with torch.no_grad():
            list(model(**given.batches[0][0]))
        assert not records
        run_micro_batches(model, given.batches[0][0])
    assert len(records) == (pipelines.ROWS if model.stage.index else 0)
    assert all(not record._products for record in records)


def test_evaluation_defers_nothing(pool: Pool, seed: int) -> None:
    pool.run(2, check_freed, lm_case("llama", seed))


# Weights and layers of other kinds ------------------------------------------------------------------------------------


def double(param: Any) -> None:
    param.grad.mul_(2)


def with_hooks(model: Any) -> Any:
    """A hook that doubles a gradient runs once for each micro-batch, in the backward pass."""
    for name, param in model.named_parameters():
        if name.endswith("down_proj.weight"):
            param.register_hook(lambda grad: 2 * grad)
        if name.endswith("up_proj.weight"):
            param.register_post_accumulate_grad_hook(double)
    return model


def with_frozen(model: Any) -> Any:
    for name, param in model.named_parameters():
        param.requires_grad_("mlp" not in name)
    return model


def with_shared(model: Any) -> Any:
    """Two blocks of a stage share a weight."""
    layers = list(model.model.layers)
    layers[0].mlp.up_proj.weight = layers[-1].mlp.up_proj.weight
    return model


def with_other_use(model: Any) -> Any:
    """Code outside of a layer reads its weight before the layer."""
    for layer in model.model.layers:
        gate, up = layer.mlp.gate_proj, layer.mlp.up_proj
        up.register_forward_hook(lambda layer, args, output, gate=gate: output + gate.weight.sum() * 1e-3)
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down_proj(mlp.up_proj(x) * mlp.act_fn(mlp.gate_proj(x)))
    return model


def with_checkpoints(model: Any) -> Any:
    """The user's own checkpoint around a part of each block."""
    for layer in model.model.layers:
        inner = layer.mlp.forward
        layer.mlp.forward = lambda x, inner=inner: torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False)
    return model


@pytest.mark.parametrize("prepare", [with_hooks, with_frozen, with_shared, with_other_use, with_checkpoints])
def test_other_uses_of_weights(pool: Pool, prepare: Callable[[Any], Any], seed: int) -> None:
    config = pipelines.config("llama", 0.1)
    run = Run(LM["llama"], config, batches_of(LM["llama"], config, seed), prepare=prepare)
    pool.run(2, check_same_bits, run)


def with_later_use(model: Any) -> Any:
    """Code outside of a layer reads its weight after the layer."""
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda layer, args, output: output + layer.weight.sum() * 1e-3)
    return model


def check_later_use(run: Run) -> None:
    """The gradient is right to rounding, since its parts are accumulated one by one."""
    expected, found = (
        results_of(
            model := run.prepare(make(run.name, run.config, 1, 2, run.dtype, schedule)), model, run.batches, run.step
        )
        for schedule in SCHEDULES
    )
    assert all((found[key] - x).abs().max() <= 1e-12 for key, x in expected.items() if x is not None)


def check_later_use_of_replicas(run: Run) -> None:
    """DDP would reduce the gradient before it is complete, if it has one micro-batch to learn of the use."""
    model = run.prepare(make(run.name, run.config, 1, 2, run.dtype, "zb-h1", micro_batch_size=3))
    ddp = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
    batch = {key: x[:3] for key, x in run.batches[0].items()}
    with pytest.raises(
        RuntimeError, match="has another use than in its linear layer" if model.stage.index else "stage"
    ):
        run.step(ddp, batch)


def test_weight_with_a_later_use(pool: Pool, seed: int) -> None:
    config = pipelines.config("llama")
    run = Run(LM["llama"], config, batches_of(LM["llama"], config, seed), prepare=with_later_use)
    pool.run(2, check_later_use, run)
    pool.run(4, check_later_use_of_replicas, run)


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    options = LoraConfig(r=3, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(model, options)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters(pool: Pool, tp: int, seed: int) -> None:
    """Frozen weights have no gradient. The weights of the adapter are deferred."""
    config = pipelines.config("llama", 0.1)
    batches = batches_of(LM["llama"], config, seed)
    pool.run(2 * tp, check_same_bits, Run(LM["llama"], config, batches, tp, prepare=with_adapter))


def fused(model: Any) -> Any:
    model.fuse()
    return model


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_fused_modules(pool: Pool, variant: str, seed: int) -> None:
    config, name = pipelines.config(variant, 0.1), LM[variant]
    batches = batches_of(name, config, seed, dtype=torch.float32)
    pool.run(2, check_same_bits, Run(name, config, batches, prepare=fused, dtype=torch.float32))


def check_initialized(given: Case, seed: int) -> None:
    """OSLO 2's configuration has the schedule too."""
    model: Any = reference_model(given.name, given.config, seed)
    options = {"pipeline_parallel_size": 2, "schedule": "zb-h1"}
    with pytest.raises(ValueError, match="schedule must be one of"):
        oslo_models.initialize(model, {"model_parallelism": {**options, "schedule": 1}})
    model = oslo_models.initialize(model, {"model_parallelism": options})
    assert model.schedule == "zb-h1"
    with deferred_counted() as counts:
        run_micro_batches(model.train(), given.batches[0][0])
    assert bool(counts) == bool(model.stage.index)
    lines = gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    plain = reference_model(given.name, given.config, seed)
    oslo_models.initialize(plain, {"model_parallelism": {**options, "enable": False}})
    assert plain.schedule == "1f1b"


def test_schedule_in_the_configuration_of_oslo2(pool: Pool, seed: int) -> None:
    given = pipelines.case(LM["llama"], pipelines.config("llama", tie_word_embeddings=False), seed)
    pool.run(2, check_initialized, given, seed)


# Errors ---------------------------------------------------------------------------------------------------------------


def check_refusals(given: Case) -> None:
    cls: Any = registry.find(given.name)
    with pytest.raises(ValueError, match=r"schedule must be one of '1f1b', 'zb-h1', got 'gpipe'"):
        cls.from_config_with_parallel(given.config, 1, 2, schedule="gpipe")
    with pytest.raises(ValueError, match=r"schedule='zb-h1' is for pipeline stages, and pipeline_parallel_size is 1"):
        cls.from_config_with_parallel(given.config, 2, 1, schedule="zb-h1")
    model, batch = case_on_stages(given, 1, 2, schedule="zb-h1"), given.batches[0][0]
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r'"zb-h1" cannot be used with gradient checkpointing: .* "1f1b"'):
        model(**batch)
    model.gradient_checkpointing_disable()
    (block, *_) = model.transformer.h
    block.compile(backend="eager")
    with pytest.raises(ValueError, match=r'"zb-h1" cannot be used with torch.compile: .* leave torch.compile out'):
        model(**batch)
    block._compiled_call_impl = None
    model.schedule = "zb-h2"
    with pytest.raises(ValueError, match="schedule must be one of"):
        model(**batch)
    model.schedule = "zb-h1"
    error = "create_graph=True" if model.stage.is_last else ""
    with pytest.raises(RuntimeError, match=error):
        for output in model(**batch):
            output.loss.backward(create_graph=True)
    with pytest.raises(RuntimeError, match="was left before its end"):
        model(**batch)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="backward of micro-batch 0 was called"):
        for output in model(**batch):
            output.loss.backward(retain_graph=True)
            output.loss.backward()
    with pytest.raises(RuntimeError, match="was left before its end"):
        model(**batch)
    model.zero_grad()
    lines = differences("loss", run_micro_batches(model, batch), given.loss[0], TOLERANCE)
    lines += gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)


def test_refusals_name_the_argument(pool: Pool, seed: int) -> None:
    pool.run(2, check_refusals, lm_case("gpt2", seed))


def check_fsdp(given: Case) -> None:
    from torch.distributed.fsdp import fully_shard

    model = case_on_stages(given, 1, 2, schedule="zb-h1")
    fully_shard(model, mesh=model.mesh.device_mesh["dp"])
    with pytest.raises(ValueError, match='"zb-h1" cannot be used with FSDP2'):
        model(**given.batches[0][0])


def test_fsdp_is_refused(pool: Pool, seed: int) -> None:
    pool.run(4, check_fsdp, lm_case("gpt2", seed))


def check_in_place(given: Case) -> None:
    """A gradient that is modified before its weight gradient is computed raises."""
    model, (batch,) = case_on_stages(given, 1, 2, schedule="zb-h1"), given.batches[0]
    add = MicroBatchGradients.add

    def damaged(self: MicroBatchGradients, weight: nn.Parameter, grad: Tensor, *args: Any) -> None:
        add(self, weight, grad, *args)
        grad.zero_()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MicroBatchGradients, "add", damaged)
        with pytest.raises(RuntimeError, match=r"modified in place|left the loop"):
            run_micro_batches(model, batch)
    with pytest.raises(RuntimeError, match="was left before its end"):
        model(**batch)
    model.zero_grad()
    run_micro_batches(model, batch)
    lines = gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)


def test_modified_gradient_raises_on_every_stage(pool: Pool, seed: int) -> None:
    pool.run(2, check_in_place, lm_case("gpt2", seed))


def test_products_of_layers_defer_their_weight_gradient() -> None:
    """The functions that layers of transformers call, and this library's own product for many rows."""
    weight = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 3, 4, requires_grad=True)
    bias = torch.randn(4)
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.nn.functional.linear(x, weight, bias=bias),
        lambda: torch.addmm(bias, x.view(-1, 4), weight).view(2, 3, 4),
        lambda: x @ weight,
        lambda: torch.matmul(x, weight),
        lambda: x.matmul(weight),
        *(lambda io=io: trained_product(x, weight, bias, io, ONEDNN) for io in (False, True) if has_onednn()),
    ]
    for call in calls:
        x.grad = weight.grad = None
        call().square().sum().backward()
        expected = x.grad, weight.grad
        x.grad = weight.grad = None
        deferred = DeferredGradients([weight], lambda i, param, grad: param.backward(grad))
        with deferred.recording(0):
            assert deferred_gradients.defers_weight_gradients()
            output = call()
        output.square().sum().backward()
        assert weight.grad is None
        deferred.after_backward(0)
        deferred.compute()
        assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])
