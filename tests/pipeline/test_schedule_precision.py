"""The loop over micro-batches in half precision and with gradient checkpointing."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from oslo_models import registry

from support import pipelines, zoo
from support.pipelines import (
    LM,
    Case,
    case_on_stages,
    gather_from_all_ranks,
    gradients_on_stage,
    run_micro_batches,
    stage_parameters,
)
from support.pool import Pool
from support.reference import differences, full_parameters, reference_model

# Half precision -------------------------------------------------------------------------------------------------------


def train_in_half_precision(given: Case, tp: int, dtype: torch.dtype) -> tuple[list[float], list[float], bool]:
    """Return losses and scales of five steps, and whether copies of tied parameters stay bitwise equal."""
    cls: Any = registry.find(given.name)
    model = cls.from_config_with_parallel(given.config, tp, 2, seed=3)
    batch = given.batches[0][0]
    optimizer, scaler = (
        torch.optim.AdamW(model.gpu_parameters(), lr=0.01),
        torch.amp.GradScaler("cpu", init_scale=2.0**10),
    )
    losses, scales = [], []
    for _ in range(5):
        with torch.autocast("cpu", dtype=dtype):
            made = []
            for output in model(**batch):
                made.append(output.loss)
                scaler.scale(output.loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in made))
        scales.append(scaler.get_scale())
    own = {name: param.detach().clone() for name, param in stage_parameters(model).items()}
    tied = model.stage.tied_names
    everything: dict[tuple[str, int], list[Tensor]] = {}
    for tp_rank, held in gather_from_all_ranks((model.mesh.tp.rank, own)):
        for name, value in held.items():
            everything.setdefault((tied.get(name, name), tp_rank), []).append(value)
    assert any(len(values) > 1 for values in everything.values())
    return losses, scales, all(torch.equal(value, values[0]) for values in everything.values() for value in values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("variant", "tp"), [("gpt2", 1), ("gpt2", 2), ("llama", 1), ("t5", 1), ("bert", 1)])
def test_train_step_on_stages_in_half_precision(
    pool: Pool, variant: str, tp: int, dtype: torch.dtype, seed: int
) -> None:
    """Autocast and loss scaling, with dropout: every rank sees the same losses, and they fall."""
    config = pipelines.config(variant, dropout=0.02)
    batch = pipelines.batch(LM[variant], config, seed, dtype=torch.float32)
    given = Case(LM[variant], config, [[batch]], {}, [], {})
    results = pool.run(2 * tp, train_in_half_precision, given, tp, dtype)
    for losses, scales, same in results:
        assert same
        assert losses[-1] < losses[0]
        assert (losses, scales) == results[0][:2]


def overflow_on_one_rank(given: Case, bad_rank: int) -> tuple[list[float], list[bool]]:
    """Return three steps' loss scales, and whether each step ran; one rank overflows in the second step."""
    cls: Any = registry.find(given.name)
    model = cls.from_config_with_parallel(given.config, 2, 2, seed=3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    scales, stepped = [], []
    for step in range(3):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        bad = step == 1 and dist.get_rank() == bad_rank
        weight = next(param for name, param in model.named_parameters() if name.endswith("mlp.c_fc.weight"))
        hook = weight.register_hook(lambda grad, bad=bad: grad * float("inf") if bad else grad)
        with torch.autocast("cpu", dtype=torch.float16):
            for output in model(**given.batches[0][0]):
                scaler.scale(output.loss).backward()
        hook.remove()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    return scales, stepped


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_grad_scaler_skips_a_step_on_all_stages_after_an_overflow_on_one(pool: Pool, bad_rank: int, seed: int) -> None:
    config = pipelines.config("gpt2")
    batch = pipelines.batch(LM["gpt2"], config, seed, dtype=torch.float32)
    given = Case(LM["gpt2"], config, [[batch]], {}, [], {})
    for result in pool.run(4, overflow_on_one_rank, given, bad_rank):
        assert result == ([8.0, 4.0, 4.0], [True, False, True])


# Gradient checkpointing -----------------------------------------------------------------------------------------------


def check_checkpointing(given: Case, tp: int, pp: int) -> None:
    """Loss and gradients in float32 are bitwise equal with and without recomputation, dropout included."""
    lines = []
    results: dict[str, tuple[Tensor, Any, Tensor]] = {}
    for mode in ("plain", "default", "reentrant"):
        model = case_on_stages(given, tp, pp, dtype=torch.float32)
        wrapped = model
        if mode != "plain":
            options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}} if mode == "reentrant" else {}
            model.gradient_checkpointing_enable(**options)
        if model.mesh.dp.size > 1:
            wrapped = DistributedDataParallel(model, process_group=model.mpu.get_data_parallel_group())
        torch.manual_seed(5)
        if mode == "reentrant" and wrapped is not model:
            with pytest.raises(RuntimeError, match="use_reentrant=False"):  # DDP needs the parameters' hooks
                run_micro_batches(wrapped, given.batches[0][0], lift=False)
            continue
        loss = run_micro_batches(wrapped, given.batches[0][0], lift=False)
        results[mode] = loss, gradients_on_stage(model), torch.rand(3)
    loss, gradients, drawn = results.pop("plain")
    for mode, (other_loss, other_gradients, other_drawn) in results.items():
        # Reentrant checkpointing sums the gradient of the encoder output over decoder blocks in another order.
        tolerance = 1e-6 if mode == "reentrant" and given.config.is_encoder_decoder else 0
        lines += differences(f"{mode}: loss", other_loss, loss, 0)
        lines += differences(f"{mode}: what is drawn next", other_drawn, drawn, 0)
        for key, gradient in gradients.items():
            lines += differences(f"{mode}: gradient of {key}", other_gradients[key], gradient, tolerance)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_gradient_checkpointing_on_stages_matches_one_process(pool: Pool, variant: str, seed: int) -> None:
    config = pipelines.config(variant, dropout=0.3, use_cache=False)
    batch = pipelines.batch(LM[variant], config, seed, dtype=torch.float32)
    weights = full_parameters(reference_model(LM[variant], config, seed, torch.float32))
    given = Case(LM[variant], config, [[batch]], weights, [], {})
    pool.run(2, check_checkpointing, given, 1, 2)
    if variant in ("gpt2", "t5"):
        pool.run(4, check_checkpointing, given, 2, 2)
        pool.run(4, check_checkpointing, given, 1, 2)  # with two replicas, under DDP


class DropoutsCounted(TorchFunctionMode):
    """Counts active dropouts by the size of their input."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            call = inspect.signature(F.dropout).bind(*args, **kwargs).arguments
            if call.get("training", True) and call.get("p", 0.5) > 0:
                self.found[call["input"].numel()] += 1
        elif func is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0) > 0:
            self.found[args[0].numel()] += 1
        return func(*args, **kwargs)


def count_dropouts(given: Case, pp: int) -> Counter[int]:
    model = case_on_stages(given, 1, pp, dtype=torch.float32, micro_batch_size=pipelines.ROWS)
    with DropoutsCounted() as counted:
        for output in model(**given.batches[0][0]):
            output.loss.backward()
    return counted.found


@pytest.mark.drawn(4)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_each_dropout_runs_on_exactly_one_stage(pool: Pool, variant: str, pp: int, seed: int) -> None:
    """All stages together apply the same dropouts as one process, including dropouts at the ends of stacks."""
    config = pipelines.config(variant, dropout=0.3, attn_implementation="eager")
    for name in (LM[variant], pipelines.heads_with_loss(variant)[-1]):
        batch = pipelines.batch(name, config, seed, dtype=torch.float32)
        model = reference_model(name, config, seed, torch.float32)
        given = Case(name, config, [[batch]], full_parameters(model), [], {})
        with DropoutsCounted() as counted:
            model(**batch)
        assert counted.found
        assert sum(pool.run(pp, count_dropouts, given, pp), Counter()) == counted.found
