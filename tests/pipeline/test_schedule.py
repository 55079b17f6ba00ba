"""The loop over micro-batches: user code in its body, messages between stages, activations in flight."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig

from oslo_models.distributed import collectives
from oslo_models.pipeline.schedule import Schedule
from oslo_models.pipeline.stage_runner import StageRunner

from support import pipelines, zoo
from support.float64 import lifted_casts
from support.pipelines import (
    LM,
    Batch,
    Case,
    case,
    case_on_stages,
    gradient_differences,
    gradients_on_stage,
    lm_case,
    model_on_stages,
    run_micro_batches,
    run_reference_step,
    stage_parameters,
)
from support.pool import Pool
from support.reference import TOLERANCE, differences, full_gradients, full_parameters, reference_model

# In the body of the loop ----------------------------------------------------------------------------------------------


def check_body(given: Case, twice: dict[str, Tensor | None], tp: int, pp: int) -> None:
    """Loss scales, accumulation, `train_batch`, and a copy of the model, one after another on the same stages."""
    batch, lines = given.batches[0][0], []
    model = case_on_stages(given, tp, pp)
    for scale in (1 / 3, 1024.0):
        lines += differences("scaled loss", run_micro_batches(model, batch, scale), given.loss[0], TOLERANCE)
        expected = {key: None if grad is None else grad * scale for key, grad in given.gradients.items()}
        lines += gradient_differences(model, expected, TOLERANCE * max(1, scale), f"gradient x {scale:g} of")
        model.zero_grad()

    with lifted_casts():
        loss = model.train_batch(**batch)
    assert not loss.requires_grad
    lines += differences("train_batch", loss, given.loss[0], TOLERANCE)
    lines += gradient_differences(model, given.gradients, what="train_batch: gradient of")

    model.set_micro_batch_size(2)  # the gradients of a second batch are added
    run_micro_batches(model, given.batches[1][0])
    lines += gradient_differences(model, twice, what="accumulated gradient of")
    model.zero_grad()

    other = copy.deepcopy(model)
    before = gradients_on_stage(model)
    lines += differences("loss of a copy", run_micro_batches(other, batch), given.loss[0], TOLERANCE)
    lines += gradient_differences(other, given.gradients, what="copy: gradient of")
    assert all(grad is before[key] for key, grad in gradients_on_stage(model).items())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)  # the copy does not see that
    other.zero_grad()
    lines += differences("loss of a copy of its own", run_micro_batches(other, batch), given.loss[0], TOLERANCE)
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("variant", "tp", "pp"),
    [
        *((variant, 1, 2) for variant in zoo.FOUNDING),
        ("gpt2", 1, 4),
        ("gpt2", 2, 2),
        ("t5", 1, 4),
        ("t5", 2, 2),
    ],
)
def test_micro_batch_loop_with_scaled_losses_accumulation_and_a_copied_model(
    pool: Pool, variant: str, tp: int, pp: int, seed: int
) -> None:
    batches = [[pipelines.batch(LM[variant], pipelines.config(variant), seed + step)] for step in range(2)]
    given = lm_case(variant, seed, batches=batches)
    model = reference_model(given.name, given.config, seed)
    for batch in batches:
        run_reference_step(model, batch)
    pool.run(tp * pp, check_body, given, full_gradients(model), tp, pp)


Clipped = dict[tuple[float, float], tuple[Tensor, dict[str, Tensor | None]]]


def check_clipping(given: Case, expected: Clipped, tp: int, pp: int) -> None:
    model, lines = case_on_stages(given, tp, pp), []
    run_micro_batches(model, given.batches[0][0])
    unclipped = {param: param.grad.clone() for param in model.parameters() if param.grad is not None}
    for (max_norm, norm_type), (norm, gradients) in expected.items():
        for param, grad in unclipped.items():
            param.grad = grad.clone()
        lines += differences(f"norm {norm_type}", model.clip_grad_norm_(max_norm, norm_type), norm, TOLERANCE)
        lines += gradient_differences(model, gradients, what=f"clipped to {max_norm} in norm {norm_type}:")
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("tp", "pp"), [(1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("variant", ["bert", "gpt2", "gptj-tied", "llama-one-kv", "t5"])
def test_clip_grad_norm_over_stages_matches_one_process(pool: Pool, variant: str, tp: int, pp: int, seed: int) -> None:
    """A parameter of several stages counts once."""
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed)
    expected: Clipped = {}
    model = reference_model(given.name, given.config, seed)
    for max_norm, norm_type in ((1e-2, 2.0), (1e6, 1.0), (1e-3, float("inf"))):
        for name, param in model.named_parameters():
            param.grad = None if given.gradients[name] is None else given.gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        expected[max_norm, norm_type] = norm, full_gradients(model)
    pool.run(tp * pp, check_clipping, given, expected, tp, pp)


def check_frozen(given: Case, gradients: dict[str, Tensor | None], pp: int) -> None:
    """Only the last block and the head train: earlier stages have nothing to train."""
    model = case_on_stages(given, 1, pp)
    for name, param in stage_parameters(model).items():
        param.requires_grad_(not (name.startswith("transformer.") and ".3." not in name))
    lines = differences("loss", run_micro_batches(model, given.batches[0][0]), given.loss[0], TOLERANCE)
    lines += gradient_differences(model, gradients)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(("variant", "pp"), [("gptj", 2), ("gptj", 4), ("gpt2-untied", 4)])
def test_train_step_with_frozen_stages(pool: Pool, variant: str, pp: int, seed: int) -> None:
    given = case(zoo.lm_head(variant), pipelines.config(variant), seed)
    model = reference_model(given.name, given.config, seed)
    for name, param in model.named_parameters():
        param.requires_grad_(not (name.startswith("transformer.") and ".3." not in name))
    run_reference_step(model, given.batches[0])
    pool.run(pp, check_frozen, given, full_gradients(model), pp)


def check_side_by_side(cases: list[Case]) -> None:
    """Two alternating loops over models of different families, and one loop inside the body of the other."""
    lines = []

    def models() -> list[Any]:
        return [case_on_stages(given, 1, 2, micro_batch_size=1) for given in cases]

    def check(made: list[Any], what: str) -> None:
        for model, given in zip(made, cases, strict=True):
            lines.extend(f"{what}: {line}" for line in gradient_differences(model, given.gradients))

    one, two = made = models()
    with lifted_casts():
        for left, right in zip(one(**cases[0].batches[0][0]), two(**cases[1].batches[0][0]), strict=True):
            right.loss.backward()
            left.loss.backward()
    check(made, "in turns")
    one, two = made = models()
    with lifted_casts():
        for number, left in enumerate(one(**cases[0].batches[0][0])):
            if number == 1:
                for right in two(**cases[1].batches[0][0]):
                    right.loss.backward()
            left.loss.backward()
    check(made, "nested")
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variants", [("gpt2", "llama"), ("t5", "gpt2")], ids="-".join)
def test_two_pipelines_in_one_process(pool: Pool, variants: tuple[str, str], seed: int) -> None:
    pool.run(2, check_side_by_side, [lm_case(variant, seed) for variant in variants])


def check_refusals(given: Case) -> None:
    model = case_on_stages(given, 1, 2, micro_batch_size=3)
    batch = given.batches[0][0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"4 rows .* micro_batch_size=3") as refusal:
            model(**batch)
        assert "set_micro_batch_size" in str(refusal.value)
    with pytest.raises(ValueError, match="no rows"):
        model(attention_mask=None)
    with pytest.raises(ValueError, match="micro_batch_size"):
        model.set_micro_batch_size(0)
    model.set_micro_batch_size(4)  # one micro-batch is fewer than stages
    lines = differences("loss", run_micro_batches(model, batch), given.loss[0], TOLERANCE)
    lines += gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)


def test_batch_must_divide_into_micro_batches(pool: Pool, seed: int) -> None:
    pool.run(2, check_refusals, lm_case("gpt2", seed))


# Without gradients ----------------------------------------------------------------------------------------------------


def check_evaluation(
    name: str, config: PreTrainedConfig, weights: dict[str, Tensor], batch: Batch, outputs: dict[str, Tensor], pp: int
) -> None:
    """The loss is known on every rank after the loop; everything else is on the last stage, row by row."""
    model = model_on_stages(name, config, weights, 1, pp, micro_batch_size=2).eval()
    with torch.no_grad(), lifted_casts():
        made = list(model(**batch))
    lines = []
    if "loss" in outputs:
        assert not any(output.loss.requires_grad for output in made)
        lines += differences("loss", torch.stack([output.loss for output in made]).sum(), outputs["loss"], TOLERANCE)
    for key, expected in outputs.items():
        if key == "loss":
            continue
        if not model.stage.is_last:
            assert all(getattr(output, key.split(".")[0]) is None for output in made)
            continue
        own = [pipelines.floats(output)[key] for output in made]
        lines += differences(key, torch.cat(own), expected, TOLERANCE)
    assert not any(param.grad is not None for param in model.parameters())
    assert not lines, "\n".join(lines)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_evaluation_loop_returns_outputs_on_the_last_stage(pool: Pool, variant: str, pp: int, seed: int) -> None:
    for name in (zoo.base(variant), LM[variant], pipelines.heads_with_loss(variant)[-1]):
        config = pipelines.config(variant, use_cache=False)
        model = reference_model(name, config, seed).eval()
        batch = pipelines.batch(name, config, seed)
        with torch.no_grad(), lifted_casts():
            outputs = pipelines.floats(model(**batch))
        pool.run(pp, check_evaluation, name, config, full_parameters(model), batch, outputs, pp)


# Accumulation under data parallelism ----------------------------------------------------------------------------------


def check_accumulation(given: Case, quietly: bool) -> None:
    """Two loops before the optimizer steps; with ``no_sync``, replicas communicate in the second loop only."""
    model = case_on_stages(given, 1, 2)
    ddp = DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())
    for step, batches in enumerate(given.batches):
        with ddp.no_sync() if quietly and step == 0 else nullcontext():
            run_micro_batches(ddp, batches[model.mesh.dp.rank])
    lines = gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("quietly", [False, True], ids=["in sync", "no_sync"])
@pytest.mark.parametrize("variant", ["gpt2", "t5"])
def test_gradient_accumulation_over_replicas_with_and_without_no_sync(
    pool: Pool, variant: str, quietly: bool, seed: int
) -> None:
    config = pipelines.config(variant)
    batches = [[pipelines.batch(LM[variant], config, seed + 10 * step + r) for r in range(2)] for step in range(2)]
    model = reference_model(LM[variant], config, seed)
    weights = full_parameters(model)
    for step in batches:
        run_reference_step(model, step)
    pool.run(4, check_accumulation, Case(LM[variant], config, batches, weights, [], full_gradients(model)), quietly)


# Messages and live activations ----------------------------------------------------------------------------------------


class Counted:
    """While active, record every message: ``(operation, group, peer, elements)``."""

    SENDS = ("isend", "send", "recv", "irecv")
    COLLECTIVES = (
        *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce"),
        *("all_to_all", "all_to_all_single", "gather", "scatter", "all_gather_object", "broadcast_object_list"),
        *("batch_isend_irecv", "reduce_scatter", "barrier", "send_object_list", "recv_object_list", "gather_object"),
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[str, Any, int, int]] = []
        self.collectives: list[tuple[str, Any, int]] = []
        patch.setattr(collectives, "shared_memory_of", lambda axis: None)  # which would take their place
        for name in self.SENDS:
            patch.setattr(dist, name, self._message(name, getattr(dist, name)))
        for name in self.COLLECTIVES:
            patch.setattr(dist, name, self._collective(name, getattr(dist, name)))

    def _message(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tensor: Tensor, peer: int, group: Any = None) -> Any:
            self.messages.append((name, group, peer, tensor.numel()))
            return original(tensor, peer, group=group)

        return noted

    def _collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            sizes = [x.numel() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            self.collectives.append((name, kwargs.get("group"), max(sizes, default=-1)))
            return original(*args, **kwargs)

        return noted


@contextmanager
def live_counted() -> Iterator[list[int]]:
    """Return the number of live micro-batches on this stage after every forward."""
    seen: list[int] = []
    forward = Schedule._forward

    def counted(self: Schedule, i: int) -> Any:
        output = forward(self, i)
        seen.append(len(self.in_flight))
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "_forward", counted)
        yield seen


def streams_after(stage: Any) -> list[int]:
    """Return the number of hidden-state streams across each boundary between stages."""
    return [sum(stack.first <= index for stack in stage.stacks) for index in range(stage.count - 1)]


def check_traffic(given: Case, tp: int, pp: int, size: int) -> dict[str, Any]:
    model = case_on_stages(given, tp, pp, micro_batch_size=size, check_inputs=False)
    stage, mesh, batch = model.stage, model.mesh, given.batches[0][0]
    rows, length = batch["input_ids"].shape
    number, hidden = rows // size, size * length * given.config.hidden_size
    with pytest.MonkeyPatch.context() as patch, live_counted() as live:
        counted = Counted(patch)
        run_micro_batches(model, batch)
    crossing = [0, *streams_after(stage), 0]
    before, after = crossing[stage.index], crossing[stage.index + 1]
    down, up = mesh.pp.ranks[stage.index - 1], mesh.pp.ranks[(stage.index + 1) % pp]
    expected = Counter(
        {
            ("isend", mesh.pp.group, up, hidden): number * after,
            ("irecv", mesh.pp.group, down, hidden): number * before,
            ("isend", mesh.pp_back.group, down, hidden): number * before,
            ("irecv", mesh.pp_back.group, up, hidden): number * after,
        }
    )
    assert Counter(counted.messages) == +expected, counted.messages
    tied = [param.numel() for param, _ in model.pipeline.tied_parameters()]
    by_stages = {axis.group for _, axis in model.pipeline.tied_parameters()}
    sums = [numel for _, group, numel in counted.collectives if group in by_stages and numel in tied]
    assert sorted(sums) == sorted(tied)
    others = list(counted.collectives)
    for _, axis in model.pipeline.tied_parameters():
        others.remove(next(entry for entry in others if entry[1] is axis.group and entry[2] in tied))
        others.remove(("all_reduce", axis.group, 2))  # whether any stage has a gradient, and any has frozen it
    assert all(-1 < numel <= hidden for _, _, numel in others), others
    if tp == 1:
        assert [(name, numel) for name, _, numel in others] == [("all_reduce", number + pp + 1)]
    return {"stage": stage.index, "live": max(live), "bound": min(number, pp - stage.index)}


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("tp", "pp", "size"), [(1, 4, 1), (1, 4, 2), (2, 2, 1)])
@pytest.mark.parametrize("variant", zoo.FOUNDING)
def test_messages_between_stages_and_activations_in_flight_are_bounded(
    pool: Pool, variant: str, tp: int, pp: int, size: int, seed: int
) -> None:
    """One activation per micro-batch and stream forward, one gradient back; no logits, and no larger messages."""
    config = pipelines.config(variant)
    batch = pipelines.batch(LM[variant], config, seed, rows=6)
    weights = full_parameters(reference_model(LM[variant], config, seed))
    for found in pool.run(tp * pp, check_traffic, Case(LM[variant], config, [[batch]], weights, [], {}), tp, pp, size):
        assert found["live"] == found["bound"], found


# Receives that overlap with computations -----------------------------------------------------------------------------

ORDER = {
    (2, 0): "F rF wB rF wB rF wrB wB",
    (2, 1): "rwF rB wF rB wF rB wF B",
    (3, 0): "F F rF wB rF wrB wrB wB",
    (3, 1): "rwrF wrF wrB wrF wrB wrF wrB wB",
    (3, 2): "rwF rB wF rB wF rB wF B",
}
"""Events of four micro-batches by stages and stage: start of a receive, wait for it, forward and backward."""


@contextmanager
def events_noted() -> Iterator[list[str]]:
    """Return the events of this stage, ``"R"`` for a receive that blocks included."""
    events: list[str] = []
    depth = 0
    receive, start, run, backward = dist.recv, dist.irecv, StageRunner.__call__, torch.autograd.backward

    def blocking(*args: Any, **kwargs: Any) -> Any:
        events.append("R")
        return receive(*args, **kwargs)

    def started(*args: Any, **kwargs: Any) -> Any:
        events.append("r")
        work: Any = start(*args, **kwargs)

        def wait() -> None:
            events.append("w")
            work.wait()

        return SimpleNamespace(wait=wait)

    def forward(self: StageRunner, *args: Any) -> Any:
        events.append("F")
        return run(self, *args)

    def nested(*args: Any, **kwargs: Any) -> None:
        nonlocal depth
        if depth:  # inside the backward of the loss object
            events.append("B")
        depth += 1
        try:
            backward(*args, **kwargs)
        finally:
            depth -= 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "recv", blocking)
        patch.setattr(dist, "irecv", started)
        patch.setattr(StageRunner, "__call__", forward)
        patch.setattr(torch.autograd, "backward", nested)
        yield events


def check_receives(given: Case, pp: int) -> None:
    model = case_on_stages(given, 1, pp)
    with events_noted() as events:
        loss = run_micro_batches(model, given.batches[0][0])
    lines = differences("loss", loss, given.loss[0], TOLERANCE)
    lines += gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    assert "".join(events) == ORDER[pp, model.stage.index].replace(" ", "")


@pytest.mark.parametrize("pp", [2, 3])
def test_receives_start_before_the_computation_that_they_overlap_with(pool: Pool, pp: int, seed: int) -> None:
    """This shows the order of the calls. Only a GPU can show that the transfer takes no time of the computation."""
    pool.run(pp, check_receives, lm_case("gpt2", seed), pp)


def check_few_receives(given: Case, size: int) -> None:
    """With fewer micro-batches than stages, the gradient depends on the last forward: nothing starts before it."""
    model = case_on_stages(given, 1, 3, micro_batch_size=size)
    with events_noted() as events:
        lines = differences("loss", run_micro_batches(model, given.batches[0][0]), given.loss[0], TOLERANCE)
    lines += gradient_differences(model, given.gradients)
    assert not lines, "\n".join(lines)
    if model.stage.index == 0:
        assert "".join(events) == {2: "FFrwrBwB", 4: "FrwB"}[size]


@pytest.mark.parametrize("size", [2, 4])
def test_no_receive_starts_before_the_computation_that_it_depends_on(pool: Pool, size: int, seed: int) -> None:
    pool.run(3, check_few_receives, lm_case("gpt2", seed), size)
