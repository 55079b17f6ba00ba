"""Exceptions in the loop over micro-batches are raised on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from support import pipelines
from support.float64 import lifted_casts
from support.pipelines import Batch, Case, case_on_stages, gradient_differences, lm_case, run_micro_batches
from support.pool import Pool
from support.reference import TOLERANCE, differences


class Oops(Exception):
    pass


def break_at(at: int, after_backward: bool) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        for number, output in enumerate(model(**batch)):
            if number == at and not after_backward:
                break
            output.loss.backward()
            if number == at:
                break

    return play


def raise_at(at: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        for number, output in enumerate(model(**batch)):
            if number == at:
                raise Oops
            output.loss.backward()

    return play


def drop_after(count: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        outputs = model(**batch)
        for _ in range(count):
            next(outputs).loss.backward()
        next(outputs)
        del outputs

    return play


def forget_at(at: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        for number, output in enumerate(model(**batch)):
            if number != at:
                output.loss.backward()

    return play


def backward_again_at(at: int) -> Callable[[Any, Batch], None]:
    def play(model: Any, batch: Batch) -> None:
        made = []
        for number, output in enumerate(model(**batch)):
            made.append(output.loss)
            if number == at:
                made[0].backward()
            output.loss.backward()

    return play


def fail_in(way: str, at: int) -> Callable[[Any, Batch], None]:
    """An exception in the forward, or in the backward, of one micro-batch."""

    def play(model: Any, batch: Batch) -> None:
        calls = 0
        block = next(module for module in model.modules() if type(module).__name__.endswith(("Block", "Layer")))

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise Oops

        def watch(module: Any, args: Any, output: Any) -> None:
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

        hook = block.register_forward_pre_hook(fail) if way == "forward" else block.register_forward_hook(watch)
        try:
            for output in model(**batch):
                output.loss.backward()
        finally:
            hook.remove()

    return play


def well(model: Any, batch: Batch) -> None:
    for output in model(**batch):
        output.loss.backward()


Play = Callable[[Any, Batch], None]
NONE, OOPS = (type(None),), (Oops,)
FORGOTTEN = "was not called in the body of the loop"
AGAIN = "backward of micro-batch 0 was called, but micro-batch"


def scenarios(stages: int, rows: int) -> Iterator[tuple[str, Play, tuple[int, ...], type | None, str]]:
    """Yield each fault with its stages and the error that these stages raise at once."""
    everyone = tuple(range(stages))
    for at in range(rows):
        yield f"break before backward {at}", break_at(at, False), everyone, None, ""
    for at in range(rows - 1):
        yield f"break after backward {at}", break_at(at, True), everyone, None, ""
    for stage in everyone:
        for at in (0, rows // 2, rows - 1):
            yield f"stage {stage}: break before backward {at}", break_at(at, False), (stage,), None, ""
        yield f"stage {stage}: break after backward 1", break_at(1, True), (stage,), None, ""
        yield f"stage {stage}: exception", raise_at(1), (stage,), Oops, ""
        yield f"stage {stage}: exception at once", raise_at(0), (stage,), Oops, ""
        yield f"stage {stage}: dropped", drop_after(1), (stage,), None, ""
        yield f"stage {stage}: forgotten backward", forget_at(1), (stage,), RuntimeError, FORGOTTEN
        yield f"stage {stage}: wrong order", backward_again_at(2), (stage,), RuntimeError, AGAIN
        for way in ("forward", "backward"):
            yield f"stage {stage}: exception in {way}", fail_in(way, 1), (stage,), Oops, ""
    yield "exception", raise_at(1), everyone, Oops, ""
    yield "dropped at once", drop_after(0), everyone, None, ""
    yield "dropped", drop_after(2), everyone, None, ""
    yield "forgotten backward", forget_at(rows - 1), everyone, RuntimeError, FORGOTTEN
    yield "wrong order", backward_again_at(1), everyone, RuntimeError, AGAIN


def check_faults(given: Case, tp: int, pp: int, every: int, shares: bool = False, schedule: str = "1f1b") -> int:
    """After each scenario: other ranks learn of it, the next call raises on every rank, the call after it works."""
    stages = case_on_stages(given, tp, pp, share_logits=shares, schedule=schedule)
    model, (batch,) = stages, given.batches[0][stages.mesh.dp.rank :: stages.mesh.dp.size]
    if stages.mesh.dp.size > 1:
        model = DistributedDataParallel(stages, process_group=stages.mpu.get_data_parallel_group())
    lines, played = [], 0
    with lifted_casts():
        for number, (what, play, where, raised, text) in enumerate(scenarios(pp, pipelines.ROWS)):
            if number % every or (model is not stages and len(where) < pp):
                continue
            played += 1
            here = stages.stage.index in where
            error: BaseException | None = None
            try:
                (play if here else well)(model, batch)
            except (Oops, RuntimeError) as caught:
                error = caught.with_traceback(None)
            if not here:
                raised, text = RuntimeError, f"stage {list(where)} left the loop"
            if (
                (raised is None) != (error is None)
                or not isinstance(error, raised or type(None))
                or text not in str(error)
            ):
                lines.append(f"{what}: raised {error!r} instead of {raised}: {text}")
            try:
                model(**batch)
            except RuntimeError as caught:
                if "was left before its end" not in str(caught):
                    lines.append(f"{what}: the next call raised {caught!r}")
            else:
                lines.append(f"{what}: the next call did not raise")
            model.zero_grad()
            loss = run_micro_batches(model, batch)
            found = differences("loss", loss, given.loss[stages.mesh.dp.rank], TOLERANCE)
            found += gradient_differences(stages, given.gradients)
            lines += [f"after {what}: {line}" for line in found]
            model.zero_grad()
    assert not lines, "\n".join(lines)
    return played


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("variant", "tp", "pp", "every"), [("gpt2", 1, 2, 1), ("gpt2", 1, 4, 1), ("gpt2", 2, 2, 3), ("t5", 1, 4, 3)]
)
def test_broken_micro_batch_loop_raises_on_every_rank(
    pool: Pool, variant: str, tp: int, pp: int, every: int, seed: int
) -> None:
    played = pool.run(tp * pp, check_faults, lm_case(variant, seed), tp, pp, every)
    assert min(played) > 10


def test_broken_micro_batch_loop_with_shared_outputs_raises_on_every_rank(pool: Pool, seed: int) -> None:
    played = pool.run(3, check_faults, lm_case("gpt2", seed), 1, 3, 2, True)
    assert min(played) > 10


def test_broken_micro_batch_loop_raises_on_every_replica(pool: Pool, seed: int) -> None:
    played = pool.run(4, check_faults, lm_case("gpt2", seed, replicas=2), 1, 2, 1)
    assert min(played) > 8


@pytest.mark.parametrize(("pp", "replicas", "every"), [(3, 1, 2), (2, 2, 1)])
def test_broken_zero_bubble_loop_leaves_no_gradients_to_the_next(
    pool: Pool, pp: int, replicas: int, every: int, seed: int
) -> None:
    given = lm_case("gpt2", seed, replicas=replicas)
    played = pool.run(pp * replicas, check_faults, given, 1, pp, every, False, "zb-h1")
    assert min(played) > 8
