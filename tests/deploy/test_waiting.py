"""Waiting for messages of short calls: no other thread takes them, and waiting blocks no other thread's core."""

from __future__ import annotations

import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oslo_models.deploy import busy_polling, engine, worker
from oslo_models.deploy.busy_polling import FIRST_PAUSE, LONGEST_LOOK, LONGEST_PAUSE, BusyPoll
from oslo_models.deploy.engine import RECEIVER_DELAY, Engine
from oslo_models.deploy.worker import LISTENER_INTERVAL, Worker


class Clock:
    """A fake clock: time passes only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


class Incoming:
    """Let a message arrive at a given look; ``None``: no message arrives."""

    def __init__(self, arrives_at: int | None = None) -> None:
        self.looks, self._arrives_at = 0, arrives_at

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        assert timeout == 0, "it sleeps"
        self.looks += 1
        return [(3, select.POLLIN)] if self._arrives_at == self.looks else []


@pytest.fixture
def on_offer(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, list[float]]:
    """Set the clock, and the times for which other threads take an offered core; later, they take a microsecond."""
    clock, taken = Clock(monkeypatch, busy_polling), list[float]()

    def offer() -> None:
        clock.now += taken.pop(0) if taken else 1e-6

    monkeypatch.setattr(busy_polling, "os", SimpleNamespace(sched_yield=offer))
    return clock, taken


def busy_poll(incoming: Incoming) -> BusyPoll:
    return BusyPoll(incoming)  # type: ignore[arg-type]


def test_polling_ends_with_a_message_or_the_time(on_offer: tuple[Clock, list[float]]) -> None:
    clock, _ = on_offer
    began = clock.now
    assert busy_poll(Incoming()).wait(1e-3) == []
    assert clock.now == pytest.approx(began + 1e-3, abs=2e-6)
    assert busy_poll(Incoming(5)).wait(1e-3) == [(3, select.POLLIN)]
    assert busy_poll(Incoming(5)).wait(0.0) == []


def test_wanted_core_is_left_for_longer_and_longer(on_offer: tuple[Clock, list[float]]) -> None:
    clock, taken = on_offer
    incoming, pauses = Incoming(), list[float]()
    waiting = busy_poll(incoming)
    for _ in range(12):
        taken.append(2 * LONGEST_LOOK)
        assert waiting.wait(1.0) == []
        pauses.append(waiting._resumes - clock.now)
        looks, clock.now = incoming.looks, waiting._resumes - 1e-6
        assert waiting.wait(1.0) == []
        assert incoming.looks == looks, "it polls within the pause"
        clock.now = waiting._resumes
    assert pauses[:3] == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)


def test_message_that_came_while_others_had_the_core_is_returned(on_offer: tuple[Clock, list[float]]) -> None:
    _, taken = on_offer
    taken.append(1.0)
    assert busy_poll(Incoming(2)).wait(1e-3) == [(3, select.POLLIN)]


def test_answers_that_come_without_others_make_the_pause_shorter(on_offer: tuple[Clock, list[float]]) -> None:
    clock, taken = on_offer
    incoming = Incoming()
    waiting = busy_poll(incoming)
    for _ in range(3):
        taken.append(1.0)
        waiting.wait(1.0)
        clock.now = waiting._resumes
    for _ in range(2):
        incoming._arrives_at = incoming.looks + 1
        assert waiting.wait(1.0)
    taken.append(1.0)
    waiting.wait(1.0)
    assert waiting._resumes - clock.now == pytest.approx(2 * FIRST_PAUSE)


class Waits:
    """Stand-in for an event: runs given actions in order while a thread waits for it."""

    def __init__(self, *happens: Callable[[], object]) -> None:
        self._happens, self.announced = list(happens), False

    def wait(self, timeout: float) -> bool:
        self._happens.pop(0)()
        return self.announced

    def clear(self) -> None:
        self.announced = False


class Ended(Exception):
    """Ends the endless loop of a thread."""


@pytest.mark.parametrize("announced", [False, True])
def test_listener_leaves_the_messages_of_short_calls_to_the_main_thread(
    monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    """The thread receives when a call has lasted for a while, or if the running batch asks for it."""
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_listen", lambda self: None)  # the loop runs below, in this thread
        tested: Any = Worker(channel := Received())
    clock, received = Clock(monkeypatch, worker), list[int]()

    def later(busy_for: float | None, is_announced: bool = False) -> Callable[[], None]:
        def happen() -> None:
            received.append(channel.count)
            clock.now += LISTENER_INTERVAL
            tested.busy_since = None if busy_for is None else clock.now - busy_for
            tested._listener_needed.announced = is_announced

        return happen

    def end() -> None:
        received.append(channel.count)
        raise Ended

    short, long = later(LISTENER_INTERVAL / 2), later(LISTENER_INTERVAL * 1.01)
    needed = later(1e-3, True) if announced else long
    tested._listener_needed = Waits(short, later(None), short, needed, later(None), end)
    with pytest.raises(Ended):
        tested._listen()
    assert received == [0, 0, 0, 0, 1, 1]


class Received:
    """A channel that counts received messages."""

    def __init__(self) -> None:
        self.count = 0

    def recv_bytes(self) -> bytes:
        self.count += 1
        return b"\0" * 16  # an undecodable message, which is for the main thread

    def send_bytes(self, data: bytes, /) -> None:
        raise AssertionError("nothing is sent")


@pytest.mark.parametrize("announced", [False, True])
def test_receiver_thread_leaves_the_answers_of_lone_calls_to_their_callers(
    monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    """The thread receives when no caller has received for a while, or if a caller asks for it."""
    tested: Any = Engine(1, 1, b"")
    executor = tested._executor = Executor(tested)
    clock, received = Clock(monkeypatch, engine), list[int]()

    def later(idle_for: float, is_announced: bool = False) -> Callable[[], None]:
        def happen() -> None:
            received.append(executor.waited)
            clock.now += RECEIVER_DELAY
            tested._received_at = clock.now - idle_for
            tested._receiver_needed.announced = is_announced

        return happen

    def end() -> None:
        received.append(executor.waited)
        tested._executor = None

    calls, idle = later(RECEIVER_DELAY / 2), later(RECEIVER_DELAY * 1.01)
    tested._receiver_needed = Waits(calls, calls, later(0.0, True) if announced else idle, calls, end)
    tested._receive_in_background(executor)
    assert received == [0, 0, 0, 1, 1]


class Executor:
    """Workers that send nothing."""

    pids = (0,)

    def __init__(self, tested: Any) -> None:
        self.waited, self._tested = 0, tested

    def wait(self, timeout: float, spin: float = 0.0) -> None:
        self.waited += 1

    def receive(self) -> list[Any]:
        return []
