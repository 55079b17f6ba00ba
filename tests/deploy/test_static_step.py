"""Decoding steps of fixed shapes, like in CUDA graphs, computed here without a capture."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import sdpa_attention

from oslo_models import registry
from oslo_models.deploy.running_batch import graphs, static_step, step_runner
from oslo_models.deploy.running_batch.graphs import GRAPHED, CaptureError
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.loop import RunningBatch
from oslo_models.deploy.running_batch.plan_channel import NoFollowers
from oslo_models.deploy.running_batch.static_step import Compute
from oslo_models.deploy.running_batch.step import Step, WholePrompt
from oslo_models.deploy.running_batch.step_runner import StepRunner
from oslo_models.distributed import autograd_collectives, collectives

from support import running, zoo
from support.float64 import lifted_casts
from support.running import static_runner

pytestmark = pytest.mark.drawn(18, of="file")

WAITS = ("local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "lift_fresh", "item")
"""Operations that make the host wait for a GPU, or copy to it: a capture allows neither."""


class Watched(TorchDispatchMode):
    """Raises for operations that a capture does not allow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.partition("::")[2].strip("_") in WAITS:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def watched(compute: Compute) -> Compute:
    """Stand-in for a capture: runs the computation, and raises where a capture would."""
    compute()  # warms up

    def replay() -> Tensor:
        with Watched():
            return compute()

    return replay


class Both:
    """A runner with steps of fixed shapes, and an eager runner as the reference for its logits."""

    def __init__(self, model: Any, limits: BatchLimits) -> None:
        self.model, self.eager, self.static = model, StepRunner(model, limits), static_runner(model, limits, watched)
        self.buckets: set[tuple[int, int, int]] = set()

    def run(self, step: Any) -> Tensor | None:
        expected, found = self.eager.run(step), self.static.run(step)
        assert self.static.static is not None
        self.buckets |= set(self.static.static._steps)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        return found


def shorten_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 8, 16, 32, ... columns, and rows that move early."""
    monkeypatch.setattr(static_step, "rounded_length", lambda length: max(8, 1 << (length - 1).bit_length()))
    monkeypatch.setattr(static_step, "SPARE_COLUMNS", 2)


@pytest.mark.parametrize(
    ("variant", "fused"),
    # fused experts look at the tokens, but on CPUs only
    [
        (variant, fused)
        for variant in sorted(GRAPHED)
        for fused in (False, True)
        if (variant, fused) != ("mixtral", True)
    ],
)
def test_padded_steps_compute_the_logits_of_the_eager_ones(
    tmp_path: Path, seed: int, variant: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of each call equal the tokens that transformers generates for the call alone."""
    shorten_buckets(monkeypatch)
    name, calls, expected = running.checked(variant, tmp_path, seed, 12)
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(tmp_path, dtype=torch.float64).eval()
    assert graphs.reason_of_model(model) is None
    if fused:
        model.fuse(measure=False)
    runners: list[Both] = []

    def both(model: Any, limits: BatchLimits) -> Both:
        runners.append(Both(model, limits))
        return runners[-1]

    monkeypatch.setattr(running, "runner_of", both)
    with lifted_casts(), torch.no_grad():
        found = running.together(model, calls, random.Random(seed), BatchLimits(rows=6, length=32, chunk=4))
    for mine, right in zip(found, expected, strict=True):
        assert mine is None or torch.equal(mine, right)
    rows, columns, _ = zip(*runners[0].buckets, strict=True)
    assert len({*rows}) > 1 and len({*columns}) > 1


def test_step_sees_no_more_than_its_bucket(pair: Any, seed: int) -> None:
    """Other columns and padding rows may contain anything; only one column of each row changes."""
    model, _ = pair
    runner = static_runner(model, BatchLimits(4, 500, 4096), static_step.run_eagerly)
    rng = random.Random(seed)
    lengths, cache = (5, 9, 2), runner.rows
    whole = [WholePrompt(number, length, -1) for number, length in enumerate(lengths)]
    with torch.no_grad():
        runner.run(Step(0, whole=whole, chunk=[rng.randrange(3, 101) for _ in range(sum(lengths))]))
        cache.make_room(4, 300)
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        expected = runner.run(Step(0, tokens=[7, 8, 9])).clone()  # type: ignore[union-attr]
        assert runner.static is not None and set(runner.static._steps) == {(4, 256, 1)}
        for layer, memory in zip(cache.layers, before, strict=True):
            for held, former in zip((layer.keys, layer.values), memory, strict=True):
                changed = (held != former).any(1).any(-1).nonzero().tolist()
                assert changed == [[0, 9], [1, 9], [2, 9], [3, cache.columns - 1]]
                held.copy_(former)
                held[:, :, 256:] = float("nan")
                held[3] = float("nan")
        cache.lengths, cache.stop = list(lengths), 9
        assert torch.equal(runner.run(Step(0, tokens=[7, 8, 9])), expected)  # type: ignore[arg-type]


def test_columns_of_a_row_that_joins_are_zeros(pair: Any, seed: int) -> None:
    """Leftover values of a former row, such as infinities, are multiplied by zero and must not become NaN."""
    model, _ = pair
    runner = static_runner(model, BatchLimits(2, 100, 4096), static_step.run_eagerly)
    with torch.no_grad():
        runner.run(Step(0, whole=[WholePrompt(0, 3, -1)], chunk=[5, 6, 7]))
        runner.rows.make_room(2, 20)
        for layer in runner.rows.layers:
            layer.keys[1:] = layer.values[1:] = float("inf")
        runner.run(Step(0, whole=[WholePrompt(1, 2, -1)], chunk=[5, 6]))
        assert bool(runner.run(Step(0, tokens=[7, 8])).isfinite().all())  # type: ignore[union-attr]
        for layer in runner.rows.layers:
            layer.keys[:, :, runner.rows.stop :] = float("inf")
        runner.rows.compact()
        assert bool(runner.run(Step(0, tokens=[7, 8])).isfinite().all())  # type: ignore[union-attr]


class Captures:
    """Counts captures; captures fail from a chosen number on."""

    def __init__(self, fails_from: int = 1000, error: type[Exception] = CaptureError) -> None:
        self.count, self._fails_from, self._error = 0, fails_from, error

    def __call__(self, compute: Compute) -> Compute:
        self.count += 1
        if self.count >= self._fails_from:
            raise self._error("operation not permitted when stream is capturing")
        return compute


def decode(runner: StepRunner, tokens: Sequence[int], begins: bool = False) -> Tensor:
    """Run prompts of these tokens, and then a decoding step."""
    with torch.no_grad():
        if begins:
            runner.run(Step(0, whole=[WholePrompt(n, 1, -1) for n in range(len(tokens))], chunk=list(tokens)))
        found = runner.run(Step(0, tokens=list(tokens)))
    assert found is not None
    return found.clone()


def test_graphs_are_kept_until_the_memory_or_the_model_changes(pair: Any) -> None:
    model, _ = pair
    captures = Captures()
    runner = static_runner(model, BatchLimits(4, 500, 4096), captures)
    decode(runner, [5, 6], begins=True)
    decode(runner, [7, 8])
    assert captures.count == 1
    runner.rows.make_room(2, 300)
    decode(runner, [7, 8])
    assert captures.count == 2
    runner.rows.make_room(4, 300)  # the same shapes at other addresses
    decode(runner, [7, 8])
    assert captures.count == 3
    runner.drop_graphs()
    decode(runner, [7, 8])
    decode(runner, [7, 8])
    assert captures.count == 4
    expected = StepRunner(model, BatchLimits(4, 500, 4096))
    decode(expected, [5, 6], begins=True)
    for _ in range(5):
        decode(expected, [7, 8])
    torch.testing.assert_close(decode(runner, [3, 4]), decode(expected, [3, 4]), rtol=1e-10, atol=1e-10)


def test_capture_that_fails_is_told_once_and_steps_are_computed_eagerly(pair: Any) -> None:
    model, _ = pair
    runner = static_runner(model, BatchLimits(4, 500, 4096), Captures(fails_from=2))
    eager = StepRunner(model, BatchLimits(4, 500, 4096))
    for begins, tokens in ((True, [5, 6]), (False, [7, 8])):
        torch.testing.assert_close(
            decode(runner, tokens, begins), decode(eager, tokens, begins), rtol=1e-10, atol=1e-10
        )
    runner.drop_graphs()
    with pytest.warns(UserWarning, match="without CUDA graphs from now on: operation not permitted"):
        found = decode(runner, [9, 9])
    torch.testing.assert_close(found, decode(eager, [9, 9]), rtol=1e-10, atol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(decode(runner, [3, 4]), decode(eager, [3, 4]), rtol=1e-10, atol=1e-10)
    assert runner.static is None and runner.eager_reason.startswith("a capture failed: operation not")


def test_memory_that_runs_out_drops_the_graphs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair
    captures = Captures()
    runner = static_runner(model, BatchLimits(4, 500, 4096), captures)
    decode(runner, [5, 6], begins=True)

    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_prefill_whole", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            runner.run(Step(0, whole=[WholePrompt(3, 1, -1)], chunk=[5]))
    runner.clear()  # as the loop does on every rank, whatever the error of the rank is
    assert runner.static is not None and len(runner.static) == 0
    decode(runner, [7, 8], begins=True)
    assert captures.count == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "falcon"}, "steps of model_type='falcon' were not tested in CUDA graphs"),
        ({"_attn_implementation_internal": "flex_attention"}, "attn_implementation='flex_attention': CUDA graphs need"),
        ({"pipeline": object()}, "pipeline stages compute in turn"),
        ({"is_tensor_parallelized": lambda: True}, "tensor parallelism: collectives in CUDA graphs were not tested"),
        ({}, None),
    ],
)
def test_models_without_graphs_are_named(
    pair: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str | None
) -> None:
    model, _ = pair
    for name, value in change.items():
        monkeypatch.setattr(model if hasattr(model, name) else model.config, name, value, raising=False)
    found = graphs.reason_of_model(model)
    assert found is None if reason is None else str(found).startswith(reason)
    assert graphs.capture_of(model) == (None, "its device is cpu, not a GPU")


class FakeCuda:
    """Stand-in for ``torch.cuda``: streams and graphs that record their calls.

    Attributes:
        log: the calls, in order.
    """

    def __init__(self, fails: bool = False) -> None:
        self.log: list[str] = []
        self.fails, self._number, self._current = fails, 0, FakeStream(self, "default")

    def named(self, kind: str) -> str:
        self._number += 1
        return f"{kind} {self._number}"

    def device(self, device: Any) -> Any:
        return nullcontext()

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802  torch's name
        return FakeStream(self, self.named("stream"))

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802  torch's name
        return FakeGraph(self, self.named("graph"))

    def current_stream(self) -> FakeStream:
        return self._current

    def set_stream(self, stream: FakeStream) -> None:
        self._current = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        former, self._current = self._current, stream
        yield
        self._current = former

    @contextmanager
    def graph(self, graph: FakeGraph, pool: Any, stream: FakeStream, capture_error_mode: str) -> Iterator[None]:
        former, self._current = self._current, stream
        self.log.append(f"begin {graph.name} on {stream.name}, {capture_error_mode}")
        graph.id = pool or self.named("pool")
        yield
        if self.fails:  # like in torch, the stream of the capture stays current
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.log.append(f"end {graph.name} in {graph.id}")
        self._current = former


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    id: Any = None

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def pool(self) -> Any:
        return self.id

    def replay(self) -> None:
        self._cuda.log.append(f"replay {self.name}")


@pytest.mark.parametrize("fails", [False, True])
def test_capture_is_warmed_up_on_its_stream_and_shares_memory(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The stand-in checks the order of calls. The rehearsal checks that a GPU accepts them."""
    cuda = FakeCuda(fails)
    for name in ("device", "Stream", "CUDAGraph", "current_stream", "set_stream", "stream", "graph"):
        monkeypatch.setattr(graphs.torch.cuda, name, getattr(cuda, name))
    capture, made = graphs.CudaGraphs(torch.device("cuda", 0)), torch.zeros(1)

    def compute() -> Tensor:
        cuda.log.append(f"compute on {cuda.current_stream().name}")
        return made

    begun = ["stream 1 waits for default", *["compute on stream 1"] * 2, "default waits for stream 1"]
    begun += ["begin graph 2 on stream 1, thread_local", "compute on stream 1"]
    if fails:
        with pytest.raises(CaptureError, match="RuntimeError: CUDA error: operation failed"):
            capture(compute)
        assert cuda.log == begun and cuda.current_stream().name == "default"
        return
    replay = capture(compute)
    assert cuda.log == [*begun, "end graph 2 in pool 3"]
    assert replay() is made and cuda.log[-1] == "replay graph 2"
    other = capture(compute)
    assert cuda.log[-1] == "end graph 4 in pool 3", "memory is shared"
    del replay, other
    gc.collect()
    capture(compute)
    assert cuda.log[-1] == "end graph 5 in pool 6", "memory of graphs that are gone is gone, too"


class FakeCapture(graphs.CudaGraphs):
    """Captures without a GPU: a replay computes again, and ends with the mark that the capture has recorded.

    Attributes:
        collectives: per computation of a captured step, its collectives with their shapes.
        fails_from: the number of the first capture that fails on this rank.
    """

    def __init__(self, axis: Any, fails_from: int) -> None:
        super().__init__(torch.device("cpu"), axis)
        self.collectives: list[list[Any]] = []
        self.fails_from, self.count = fails_from, 0

    def _graph_of(self, compute: Compute, stream: Any, current: Any) -> tuple[Any, Tensor]:
        self.count += 1
        graph, result = FakeGraph(FakeCuda(), "graph"), compute()  # communicates, unlike a capture
        if self.count >= self.fails_from:
            raise CaptureError("out of memory")

        def replay() -> None:
            self.collectives.append([])
            result.copy_(compute())
            self._progress.write()

        graph.replay = replay  # type: ignore[method-assign]
        return graph, result


def graphs_over_ranks(folder: Path, fails_from: int) -> dict[str, Any]:
    """Decode on tensor-parallel ranks with captured steps. Captures fail on rank 1 only."""
    cls: Any = registry.find(zoo.lm_head("llama"))
    model = cls.from_pretrained_with_parallel(folder, tensor_parallel_size=2, dtype=torch.float64).eval()
    assert str(graphs.reason_of_model(model)).startswith("tensor parallelism")
    cuda, tp = FakeCuda(), model.mesh.tp
    capture = FakeCapture(tp, fails_from if tp.rank == 1 else 1000)
    limits, log = BatchLimits(4, 500, 4096), capture.collectives
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(graphs, "OVER_RANKS", True)
        assert graphs.reason_of_model(model) is None
        for name in ("device", "Stream", "current_stream", "set_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(cuda, name))
        reduce = collectives.all_reduce

        def recorded(axis: Any, x: Tensor, *args: Any) -> Tensor:
            if log:
                log[-1].append(("sum", tuple(x.shape)))
            return reduce(axis, x, *args)

        patch.setattr(autograd_collectives, "all_reduce", recorded)
        patch.setattr(collectives, "all_reduce", recorded)
        runner, eager = static_runner(model, limits, capture), StepRunner(model, limits)
        errors, before = [], None
        for begins, tokens in ((True, [5, 6, 7]), (False, [7, 8, 9]), (False, [3, 4, 5])):
            for each in (runner, eager):
                log.append([])
                found = decode(each, tokens, begins)
                if each is runner:
                    before = found.clone()
            assert before is not None
            errors.append(float((before - found).abs().max()))
    watched = tp.watchdog.in_flight.oldest()
    return {
        "errors": errors,
        "replays": [each for each in log if each],
        "warnings": [str(each.message) for each in warned if "CUDA graphs" in str(each.message)],
        "pending": None if watched is None else watched.what,
        "marks": 0 if capture._progress is None else capture._progress.completed(),
        "eager": runner.static is None,
    }


@pytest.mark.parametrize("fails_from", [1000, 1])
def test_ranks_replay_the_same_collectives_or_none(pool: Any, tmp_path: Path, fails_from: int) -> None:
    """Each replay ends with one mark. If a capture fails on one rank, all ranks compute eagerly.

    The stand-in does not show that NCCL accepts the capture, or that a dead rank stops the stream before the mark.
    """
    cls: Any = registry.find(zoo.lm_head("llama"))
    cls.from_config_with_parallel(zoo.config("llama"), dtype=torch.float64).save_pretrained(tmp_path)
    first, second = pool.run(2, graphs_over_ranks, tmp_path, fails_from)
    for found in (first, second):
        assert max(found["errors"]) < 1e-10 and found["pending"] is None
        assert found["eager"] == (fails_from == 1)
        assert len(found["warnings"]) == int(found["eager"])
        assert found["marks"] == (0 if found["eager"] else 3)
    assert first["replays"] == second["replays"]
    if fails_from == 1:
        assert "rank 1 failed" in first["warnings"][0]


def test_short_rows_move_to_the_first_columns(pair: Any) -> None:
    """Rows then do not read the columns of longer rows that have left."""
    model, _ = pair
    runner, eager = (
        static_runner(model, BatchLimits(2, 500, 4096), static_step.run_eagerly),
        StepRunner(model, BatchLimits(2, 500, 4096)),
    )
    for each in (runner, eager):
        with torch.no_grad():
            each.run(Step(0, whole=[WholePrompt(0, 300, -1)], chunk=[5] * 300))
            each.run(Step(0, whole=[WholePrompt(1, 3, -1)], chunk=[5, 6, 7]))
    found = decode(runner, [7, 8]), decode(eager, [7, 8])
    assert runner.static is not None and set(runner.static._steps) == {(2, 512, 1)}
    for each in (runner, eager):
        each.free([0])
    torch.testing.assert_close(decode(runner, [8]), decode(eager, [8]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert set(runner.static._steps) == {(2, 512, 1), (1, 256, 1)} and runner.rows.stop == 5


def test_change_of_the_model_drops_the_graphs(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair
    batch = RunningBatch(model, BatchLimits(2, 500, 64), NoFollowers(), True, lambda *sent: None, set(), lambda: None)
    assert batch.describe_graphs() == "its device is cpu, not a GPU"
    monkeypatch.setattr(step_runner, "capture_of", lambda model: (static_step.run_eagerly, ""))
    batch = RunningBatch(model, BatchLimits(2, 500, 64), NoFollowers(), True, lambda *sent: None, set(), lambda: None)
    decode(batch.runners[0], [5, 6], begins=True)
    assert batch.describe_graphs() == "1 CUDA graphs"
    batch.forget_prefixes()
    assert batch.describe_graphs() == "0 CUDA graphs"


@pytest.mark.parametrize("fused", [False, True])
def test_cache_is_not_copied_for_each_query_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    cls: Any = registry.find(zoo.lm_head("llama"))
    model = cls.from_config_with_parallel(zoo.config("llama"), dtype=torch.float64).eval()
    if fused:
        model.fuse(measure=False)
    config = model.config
    assert config.num_key_value_heads < config.num_attention_heads
    runner = static_runner(model, BatchLimits(2, 30, 64), static_step.run_eagerly)
    decode(runner, [5, 6], begins=True)

    def copies(*args: Any) -> Any:
        raise AssertionError("keys are copied for each query head")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", copies)
    decode(runner, [7, 8])
    assert config._attn_implementation == "sdpa"


def test_steps_do_not_hold_memory_that_is_replaced(pair: Any) -> None:
    """The cache grows layer by layer; a capture does not keep the computation, so it keeps no former layer alive."""
    model, _ = pair

    def captured(compute: Compute) -> Compute:
        result = compute()
        return lambda: result

    runner = static_runner(model, BatchLimits(2, 500, 64), captured)
    decode(runner, [5, 6], begins=True)
    held = [weakref.ref(layer.keys) for layer in runner.rows.layers]
    runner.rows.make_room(2, 300)
    assert [each() for each in held] == [None] * len(held)


class Reads(TorchDispatchMode):
    """Collects the memory that a computation reads but has not created."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, StorageWeakRef] = {}
        self._made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = {made.untyped_storage()._cdata for made in self._made}
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in own:
                self.read[each.untyped_storage()._cdata] = StorageWeakRef(each.untyped_storage())
        results = func(*args, **(kwargs or {}))
        self._made += [
            each
            for each in tree_leaves(results)
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in self.read
        ]
        return results


@pytest.mark.parametrize("variant", ["gemma2", "gpt2", "llama"])
def test_inputs_of_a_graph_live_as_long_as_the_graph(variant: str, tmp_path: Path, seed: int) -> None:
    """A graph stores addresses only: it keeps neither the computation nor its earlier tensors alive."""
    cls: Any = registry.find(zoo.lm_head(variant))
    model = cls.from_config_with_parallel(zoo.config(variant), seed=seed % 1000).eval()
    kept: list[dict[int, StorageWeakRef]] = []

    def capture(compute: Compute) -> Compute:
        compute()
        with Reads() as reads:
            result = compute()
        kept.append(reads.read)
        return lambda: result

    runner = static_runner(model, BatchLimits(4, 24, 64), capture)
    with torch.no_grad():
        runner.run(Step(0, whole=[WholePrompt(0, 3, -1), WholePrompt(1, 2, -1)], chunk=[5, 6, 7, 8, 9]))
        runner.run(Step(0, tokens=[10, 11]))
    gc.collect()
    (read,) = kept
    assert len(read) > len(list(model.parameters()))
    assert not [memory for memory in read.values() if memory.expired()]
