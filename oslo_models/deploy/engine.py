"""Calls workers on behalf of any number of threads, and turns whatever goes wrong into an exception of the caller's."""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from oslo_models.deploy.connection import spare_core
from oslo_models.deploy.messages import (
    Cancel,
    Failure,
    Join,
    Listening,
    Loading,
    Ping,
    Pong,
    Ready,
    Reply,
    Request,
    Setup,
    Streamed,
    encode,
)
from oslo_models.deploy.process_executor import Executor, ProcessExecutor, StartExecutor
from oslo_models.deploy.progress import Bars

GRACE = 3.0
"""Seconds that the other ranks get to answer when one has raised; they may wait for it in a collective for ever."""
AWAKE = 0.005
"""Seconds that a lone caller watches for its answer before it sleeps, where a core is free for it: what a thread does
right after it was woken takes several times as long, and a small model's call is short."""
PAUSE = 0.05
"""Seconds that callers have to hear the workers for themselves before a thread does it for them."""
ROOT_CAUSE = 0.3
"""Seconds to hear that a rank has died once another could not load: that one may only have missed it."""


class EngineError(RuntimeError):
    """The workers have died, hang, or were closed; `restart()` of the model starts others."""


class _RemoteTraceback(Exception):
    """Where a worker raised: the cause of the exception that the caller gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def raised_by_workers(error: BaseException) -> bool:
    """Whether a call raised this because of what happened to the workers, not in its own thread."""
    return isinstance(error, EngineError) or isinstance(error.__cause__, _RemoteTraceback)


class _Call:
    """One call, from the side that waits for it."""

    def __init__(self, number: int, ranks: int) -> None:
        self.number = number
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.waiting = set(range(ranks))
        self.results: dict[int, Any] = {}
        self.failure: tuple[int, Failure] | None = None
        self.deadline = float("inf")


class Engine:
    """The workers of one model. Made ready by `start`; any thread may `call`.

    Attributes:
        devices: where each rank computes.
    """

    def __init__(self, ranks: int, threads: int, make: bytes, start_executor: StartExecutor = ProcessExecutor) -> None:
        self.ranks, self._threads, self._make, self._start_executor = ranks, threads, make, start_executor
        self.devices: list[str] = []
        self._lock, self._starting = threading.Lock(), threading.RLock()
        self._calls: dict[int, _Call] = {}
        self._pongs: dict[int, tuple[float, Pong]] = {}
        self._hearing, self._unheard = threading.Lock(), threading.Event()
        self._awake = AWAKE if spare_core(ranks) else 0.0
        self._numbers, self._seeds, self._pid = itertools.count(1), random.Random(), os.getpid()
        self._broken: str | None = "it was not started"
        self._executor: Executor | None = None  # once it can be called
        self._loading: Executor | None = None

    @property
    def pids(self) -> list[int]:
        executor = self._executor or self._loading
        return executor.pids if executor else []

    # Life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and wait until each has loaded its part.

        Raises:
            EngineError: one died.
            Exception: what a worker raised while it loaded.
        """
        with self._starting:
            executor = self._loading = self._start_executor(self.ranks)
            try:
                self.devices = self._load(executor)
                self._executor, self._broken = executor, None
            except BaseException as error:
                self._broken = f"it could not be loaded: {error!r}"
                executor.kill()
                raise
            finally:
                self._loading = None
            threading.Thread(target=self._collect, args=(executor,), daemon=True, name="oslo-deploy").start()

    def _load(self, executor: Executor) -> list[str]:
        """Have the workers load their parts, and return where each of them computes."""
        for rank in range(self.ranks):
            setup = Setup(rank, self.ranks, self._threads, list(sys.path), self._make, executor.host)
            executor.send(rank, setup)
        devices: dict[int, str] = {}
        failures: dict[int, Failure] = {}
        deadline = float("inf")
        with Bars() as bars:
            while len(devices) < self.ranks and time.monotonic() < deadline:
                for rank, message in self._heard(executor, min(1.0, max(0.0, deadline - time.monotonic()))):
                    if isinstance(message, Listening):
                        for other in range(1, self.ranks):
                            executor.send(other, Join(message.port))
                    elif isinstance(message, Loading):
                        bars.show(rank, message)
                    elif isinstance(message, Ready):
                        devices[rank] = message.device
                    elif isinstance(message, Failure):
                        failures.setdefault(rank, message)
                        deadline = min(deadline, time.monotonic() + ROOT_CAUSE)
                    elif message is None and rank not in failures:
                        raise EngineError(f"{executor.obituary(rank)} while the model was loaded")
        if failures:
            raise _raised(*next(iter(failures.items())), executor.pids, "while loading")
        return [devices[rank] for rank in range(self.ranks)]

    def _heard(self, executor: Executor, timeout: float) -> list[tuple[int, Any]]:
        try:
            executor.wait(timeout)
            return list(executor.receive())
        except (OSError, ValueError):
            if self._loading is executor:  # not closed in another thread: a signal's handler has raised this
                raise
            raise EngineError("the workers were ended while the model was loaded") from None

    def restart(self) -> None:
        """End the workers and start others. Raises what `start` does."""
        with self._starting:
            self.close("it is being restarted")
            self.start()

    def close(self, why: str = "it was closed") -> None:
        """End the workers. Calls that wait raise; so do later ones."""
        if self._pid != os.getpid():  # a forked child: they belong to its parent
            return
        if (loading := self._loading) is not None:
            self._loading = None
            loading.kill()  # and who starts it hears that
        if (executor := self._executor) is not None:
            self._break(executor, why)

    def _break(self, executor: Executor, why: str) -> None:
        with self._lock:
            if self._executor is not executor:
                return
            self._executor, self._broken = None, why
            calls, self._calls = list(self._calls.values()), {}
        executor.kill()  # before anybody hears of it: who looks for survivors then finds none
        for call in calls:
            call.events.put(("raise", EngineError(f"the deployed model cannot answer: {self._broken}")))

    # Calling ----------------------------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        streamer: Any = None,
        timeout: float | None = None,
        seed: int | None = None,
        generation_config: Any = None,
        gather: bool = False,
    ) -> Any:
        """Call a method of the model on all ranks, and return what it returns; with ``gather``, on each of them.

        Args:
            streamer: gets the tokens of `generate` in this thread, as they come.
            timeout: seconds to wait.

        Raises:
            TimeoutError: it took longer; the call is cancelled.
            EngineError: the workers died or hang.
            Exception: what the workers raised, with their traceback as its cause.
        """
        if self._pid != os.getpid():
            raise EngineError("this process was forked from the one that deployed the model; deploy it here")
        seed = self._seeds.getrandbits(32) if seed is None else seed
        number = next(self._numbers)
        request = Request(number, method, args, kwargs or {}, seed, streamer is not None, gather, generation_config)
        try:
            data = encode(request, number)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"an argument of {method} cannot be sent to the workers: {error}; functions and classes have to be "
                "importable by name (not lambdas, nor defined inside a function or in the script itself)"
            ) from error
        call = _Call(number, self.ranks)
        with self._lock:  # all ranks get all calls in one order
            if self._executor is None:
                raise EngineError(f"the deployed model cannot answer: {self._broken}; model.restart() starts it again")
            self._calls[number] = call
            self._executor.broadcast(data)
        results = self._wait(call, streamer, timeout)
        return results if gather else next((result for result in results if result is not None), None)

    def _wait(self, call: _Call, streamer: Any, timeout: float | None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        ended = False
        try:
            while True:
                if streamer is None and timeout is None and len(self._calls) == 1 and not self._hearing.locked():
                    self._hear_for(call)
                if self._calls:
                    self._unheard.set()
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                kind, value = call.events.get(timeout=left)
                if kind == "stream":
                    ended = value is None
                    streamer.end() if ended else streamer.put(value)
                elif kind == "raise":
                    raise value
                else:
                    return value
        except queue.Empty:
            self._cancel(call)
            raise TimeoutError(f"no answer within timeout={timeout:g} s; the call was cancelled") from None
        except BaseException:
            self._cancel(call)
            if streamer is not None and not ended:
                with suppress(Exception):
                    streamer.end()  # whoever reads it in another thread is not to wait for ever
            raise

    def _cancel(self, call: _Call) -> None:
        with self._lock:
            if call.number in self._calls and self._executor is not None:
                self._executor.broadcast(encode(Cancel(call.number)))

    def health(self, timeout: float = 2.0) -> dict[str, Any]:
        """Ask every worker whether it lives.

        Returns:
            ``healthy``, ``reason`` (why not), and ``ranks``: of each its ``pid``, ``device``, ``busy`` (seconds in its
            present call, ``None`` when it waits for one) and ``answered`` (whether it did, in time).
        """
        executor, asked = self._executor, time.monotonic()
        if executor is None:
            return {"healthy": False, "reason": self._broken, "ranks": []}
        with self._lock:
            executor.broadcast(encode(Ping()))
        self._unheard.set()
        while time.monotonic() < asked + timeout and self._executor is executor:
            if all(self._pongs.get(rank, (0.0,))[0] > asked for rank in range(self.ranks)):
                break
            time.sleep(0.005)
        ranks = []
        for rank, (pid, device) in enumerate(zip(executor.pids, self.devices, strict=True)):
            when, pong = self._pongs.get(rank, (0.0, Pong()))
            ranks.append({"pid": pid, "device": device, "busy": pong.busy, "answered": when > asked})
        silent = [rank for rank, entry in enumerate(ranks) if not entry["answered"]]
        reason = self._broken or (f"ranks {silent} did not answer within {timeout:g} s" if silent else None)
        return {"healthy": reason is None, "reason": reason, "ranks": ranks}

    def memory(self, kind: str) -> dict[str, int]:
        """Bytes that are ``"allocated"`` or ``"reserved"``, by device; on CPU the resident memory of each worker."""
        return dict(self.call("memory", (kind,), gather=True))

    # Collecting -------------------------------------------------------------------------------------------------------

    def _collect(self, executor: Executor) -> None:
        """Hear the workers, in a thread of its own, until they end, whenever no caller does."""
        while self._executor is executor:
            self._unheard.wait(PAUSE)
            self._unheard.clear()
            if self._hearing.acquire(blocking=False):
                try:
                    calls = True
                    while calls and self._executor is executor:
                        self._hear(executor, 0.2 if self._calls else 1.0)
                        self._unheard.clear()  # its caller has put its call there before: the next line sees that
                        calls = bool(self._calls)
                finally:
                    self._hearing.release()

    def _hear_for(self, call: _Call) -> None:
        """Hear the workers in the thread of a caller, the only one there is: it is awake the sooner."""
        # Not by `acquire`: an interrupt could come before what releases it is sure to.
        with self._hearing:
            awake = self._awake
            while call.events.empty() and (executor := self._executor) is not None:
                self._hear(executor, 0.2, awake)
                awake = 0.0

    def _hear(self, executor: Executor, timeout: float, awake: float = 0.0) -> None:
        """Wait for what workers say, and tell the callers."""
        waits = True
        try:
            executor.wait(timeout, awake)
            waits = False
            self._tell(executor)
        except BaseException as error:
            if self._executor is not executor and isinstance(error, (OSError, ValueError)):
                return  # the connections were closed in another thread
            interrupted = threading.current_thread() is threading.main_thread()  # a signal's handler may raise anything
            if not (interrupted and waits):  # what was heard is gone
                self._break(executor, f"the workers cannot be heard: {error!r}")
            if interrupted:
                raise

    def _tell(self, executor: Executor) -> None:
        late = [call for call in list(self._calls.values()) if call.deadline < time.monotonic()]
        if late:
            assert late[0].failure is not None
            rank, failure = late[0].failure
            missing = sorted(late[0].waiting)
            late[0].events.put(("raise", _raised(rank, failure, executor.pids, "while the others went on")))
            why = f"rank {rank} raised {failure.error!r} and ranks {missing} did not end the same call"
            self._break(executor, why)
            return
        for rank, message in executor.receive():
            if message is None:
                if self._executor is executor:
                    self._break(executor, executor.obituary(rank))
                return
            self._take(rank, message, executor.pids)

    def _take(self, rank: int, message: Any, pids: list[int]) -> None:
        if isinstance(message, Pong):
            self._pongs[rank] = time.monotonic(), message
            return
        call = self._calls.get(message.number)
        if call is None:
            return
        if isinstance(message, Streamed):
            call.events.put(("stream", message.value))
            return
        call.waiting.discard(rank)
        if isinstance(message, Failure):
            if call.failure is None or call.failure[1].secondary > message.secondary:
                call.failure = rank, message
            call.deadline = min(call.deadline, time.monotonic() + GRACE)
        elif isinstance(message, Reply):
            call.results[rank] = message.result
        if not call.waiting:
            del self._calls[call.number]
            if call.failure is not None:
                call.events.put(("raise", _raised(*call.failure, pids)))
            else:
                call.events.put(("return", [call.results[rank] for rank in range(self.ranks)]))


def _raised(rank: int, failure: Failure, pids: list[int], when: str = "") -> BaseException:
    """The exception of a worker, as its caller gets it."""
    error = failure.error
    note = f"raised by rank {rank} (pid {pids[rank]}) of the deployed model {when}".rstrip()
    if isinstance(error, Exception):
        error.__cause__ = _RemoteTraceback(f"{note}:\n{failure.text}")
        return error
    return EngineError(f"{note}: {failure.text}")
