"""Collectives on GPUs are watched through a counter that the stream writes. Streams and graphs are mocked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from oslo_models.distributed import collectives, device_collectives
from oslo_models.distributed.device_collectives import InFlight, Progress, watched_steps

DEVICE = torch.device("cpu")


class Marks(Progress):
    """Counter with a stream that runs a queued mark only when the test says so."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queued: list[Callable[[], None]] = []
        made.append(self)

    def write(self) -> None:
        self.queued.append(super().write)

    def run(self, count: int = 1) -> None:
        for _ in range(count):
            self.queued.pop(0)()


made: list[Marks] = []


@pytest.fixture
def flights() -> InFlight:
    """Without the thread."""
    made.clear()
    flights = InFlight(SimpleNamespace(_exited=True, interval=0.01))
    flights.progress_type = Marks  # type: ignore[method-assign]
    return flights


def axis(group: str) -> Any:
    return SimpleNamespace(group=group, ranks=(0, 1), name=group, timeout=1.0)


def test_collective_is_pending_until_the_stream_has_passed_it(flights: InFlight) -> None:
    """Collectives of one stream share a counter, whatever their groups are."""
    tp, pp = axis("tp"), axis("pp")
    assert flights.queue(tp, "a sum", DEVICE, lambda: 7) == 7
    flights.queue(tp, "a sum", DEVICE, lambda: None)
    flights.queue(pp, "a receive", DEVICE, lambda: None)
    (stream,) = made
    waited = []
    for _ in range(3):
        oldest = flights.oldest()
        assert oldest is not None
        waited.append(oldest.what)
        stream.run()
    assert waited == ["a sum", "a sum", "a receive"] and flights.oldest() is None


def test_call_itself_is_watched_and_forgotten_if_it_raises(flights: InFlight) -> None:
    """NCCL connects in the call. An error of the call reaches the caller, and no mark is expected for it."""
    seen: list[Any] = []

    def fails() -> None:
        seen.append(flights.oldest())
        raise ValueError("sizes differ")

    flights.queue(axis("tp"), "a sum", DEVICE, lambda: None)
    with pytest.raises(ValueError, match="sizes differ"):
        flights.queue(axis("pp"), "a send", DEVICE, fails)
    made[0].run()
    assert flights.oldest() is None and not made[0].queued
    with pytest.raises(ValueError, match="sizes differ"):
        flights.queue(axis("pp"), "a send", DEVICE, fails)
    assert seen[1].what == "a send" and seen[1].mark is None
    flights.queue(axis("tp"), "a sum", DEVICE, lambda: None)
    assert flights.connect(axis("tp"), "a send", lambda: flights.oldest()) is not None
    made[0].run()
    assert flights.oldest() is None


def test_each_replay_of_a_graph_is_one_mark(flights: InFlight) -> None:
    """The capture records the mark; warm-up and capture expect none."""
    graph = Marks(DEVICE)
    graph.write()
    (captured,) = graph.queued
    graph.queued.clear()
    for number in (1, 2, 3):
        flights.replay(axis("tp"), "a step", graph, lambda: graph.queued.append(captured))
        oldest = flights.oldest()
        assert oldest is not None and oldest.mark == number
        graph.run()
        assert flights.oldest() is None


class OnAGPU(torch.Tensor):
    """Tensor that claims to be on a GPU."""

    is_cpu, is_cuda = False, True  # type: ignore[assignment]


def test_eager_sum_runs_on_the_current_stream(flights: InFlight, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous sum takes another stream, and two waits of one stream for an event of the other.

    The stand-in shows the form of the call, not how NCCL runs it.
    """
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False, raising=False)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **kwargs: calls.append(kwargs))
    tp = axis("tp")
    tp.size, tp.threads, tp.symmetric_memory = 2, None, None
    tp.watchdog = SimpleNamespace(in_flight=flights, error=None, waiting_for=None)
    collectives.all_reduce(tp, torch.ones(3).as_subclass(OnAGPU))
    assert calls == [{"op": dist.ReduceOp.SUM, "group": "tp"}] and len(made[0].queued) == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True, raising=False)
    collectives.all_reduce(tp, torch.ones(3).as_subclass(OnAGPU))
    assert len(calls) == 2 and len(made[0].queued) == 1, "a capture has one mark, at its end"


def test_compiled_steps_over_ranks_end_with_a_mark(flights: InFlight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else watches the collectives of compiled code. Compilation itself may take minutes and is not watched."""
    monkeypatch.setattr(device_collectives, "_stream", lambda device: 0)
    gpu, seen = torch.device("cuda", 0), []
    flights.progress_type = lambda device: Marks(DEVICE)  # type: ignore[method-assign]
    tp = axis("tp")
    tp.size, tp.watchdog = 2, SimpleNamespace(in_flight=flights)

    def compiled(x: int) -> int:
        seen.append(flights.oldest())
        return x + 1

    step = watched_steps(compiled, tp, gpu)
    assert [step(1), step(2)] == [2, 3] and len(made[0].queued) == 2
    assert seen[0] is None and seen[1].what == "a compiled step"
    made[0].run(2)
    assert flights.oldest() is None
    assert watched_steps(compiled, tp, DEVICE) is compiled
    tp.size = 1
    assert watched_steps(compiled, tp, gpu) is compiled


def test_mark_takes_one_increment_and_one_copy_in_each_mode() -> None:
    """The counter is no inference tensor, so that training may go on with it after generation."""
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"{func.overloadpacket.__name__} {args[2:]}{kwargs or ''}")
            return func(*args, **(kwargs or {}))

    with torch.inference_mode():
        progress = Progress(DEVICE)
        progress.write()
    with Seen():
        progress.write()
    assert progress.completed() == 2 and [progress.expect(), progress.expect()] == [1, 2]
    assert seen == ["add_ ()", "copy_ (True,)"] or seen == ["add_ ()", "copy_ ()" + str({"non_blocking": True})], seen
