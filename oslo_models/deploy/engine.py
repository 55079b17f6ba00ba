"""The client side of the workers: sends the calls of any number of threads and raises the workers' failures."""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import random
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from oslo_models.deploy.busy_polling import has_spare_core
from oslo_models.deploy.call_checks import SCRIPT, check_importable
from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.errors import EngineError
from oslo_models.deploy.grammar_check import end_grammar_processes
from oslo_models.deploy.loading import load_workers
from oslo_models.deploy.messages import Cancel, Ping, Pong, Request, Reused, Speculated, Stepped
from oslo_models.deploy.pending_call import PendingCall
from oslo_models.deploy.process_executor import LOOPBACK, Executor, ProcessExecutor, StartExecutor
from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS, BatchLimits
from oslo_models.deploy.serialization import encode

SPIN_SECONDS = 0.005
"""Seconds that a lone caller polls for its answer before it sleeps, if a core is free for it (see `BusyPoll`)."""
RECEIVER_DELAY = 0.05
"""Seconds until the receiver thread takes over after a caller last received for itself."""

_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines that were started and not closed since. Workers that have died may be restarted."""


class Engine:
    """The workers of one model. After `start`, any thread may `call`.

    One thread at a time receives messages and holds ``_receive_lock``. A lone caller receives for itself. The receiver
    thread (`_receive_in_background`) receives while several calls are in flight. Without a thread switch, a lone call
    of 940 us is 170 us faster (1.18 times as long with the switch, quartiles 1.15 to 1.20; with two ranks 490 us and
    1.27 times), measured as `BusyPoll` says.

    Args:
        limits: of the running batch.
        leader: the rank that schedules the running batch.

    Attributes:
        devices: the device of each rank.
        reused_tokens: number of prompt tokens that the running batch took from cached prefixes.
        drafted_tokens, accepted_tokens: number of drafted tokens in the running batch, and of accepted ones among them.
    """

    def __init__(
        self,
        ranks: int,
        threads: int,
        make: bytes,
        start_executor: StartExecutor = ProcessExecutor,
        limits: BatchLimits = DEFAULT_LIMITS,
        leader: int = 0,
    ) -> None:
        self.limits, self._leader = limits, leader
        self.ranks, self._threads, self._make, self._start_executor = ranks, threads, make, start_executor
        self.devices: list[str] = []
        self.reused_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self._lock, self._starting, self._ending = threading.Lock(), threading.RLock(), threading.RLock()
        self._calls: dict[int, PendingCall] = {}
        self._pongs: dict[int, tuple[float, Pong]] = {}
        self._receive_lock, self._receiver_needed = threading.Lock(), threading.Event()
        self._received_at = 0.0  # when a caller last received for itself
        self._spin_seconds = SPIN_SECONDS if has_spare_core(ranks) else 0.0
        self._numbers, self._seeds, self._pid = itertools.count(1), random.Random(), os.getpid()
        self._broken: str | None = "it was not started"
        self._restoring: int | None = None  # the thread that restores the state of the old workers
        self._executor: Executor | None = None  # set while calls can be made
        self._loading: Executor | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> list[int]:
        executor = self._executor or self._loading
        return executor.pids if executor else []

    # Starting and ending ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the workers and wait until each has loaded its part.

        Raises:
            EngineError: a worker died.
            Exception: a worker failed to load. The exception is the worker's.
        """
        with self._starting:
            with self._ending:  # wait until the receiver thread has ended the old workers
                pass
            executor = self._loading = self._start_executor(self.ranks)
            if executor.host == LOOPBACK and not executor.port and self.ranks > 1:
                self._directory = tempfile.TemporaryDirectory(prefix="oslo-models-", ignore_cleanup_errors=True)
            directory = self._directory.name if self._directory else None

            def receive(timeout: float) -> list[tuple[int, Any]]:
                return self._receive_while_loading(executor, timeout)

            try:
                self.devices = load_workers(
                    executor, self.ranks, self._threads, self._make, receive, directory, self.limits
                )
                self._executor, self._broken = executor, None
                _open_engines.add(self)
            except BaseException as error:
                self._broken = f"it could not be loaded: {error!r}"
                executor.kill()
                self._remove_directory()
                raise
            finally:
                self._loading = None
            threading.Thread(
                target=self._receive_in_background, args=(executor,), daemon=True, name="oslo-deploy"
            ).start()

    def _receive_while_loading(self, executor: Executor, timeout: float) -> list[tuple[int, Any]]:
        try:
            executor.wait(timeout)
            return list(executor.receive())
        except (OSError, ValueError):
            if self._loading is executor:  # no thread has closed it: a signal handler raised this
                raise
            raise EngineError("the workers ended while the model was loaded") from None

    def restart(self, restore: Callable[[], object] = lambda: None) -> None:
        """End the workers and start new ones.

        Args:
            restore: makes the calls that restore the state of the old workers. Until it has returned, calls of other
                threads raise `EngineError`, because the state would differ.

        Raises:
            Exception: `start` or ``restore`` failed. Then there are no workers.
        """
        with self._starting:
            self._end_workers("it is being restarted")
            self._restoring = threading.get_ident()
            try:
                self.start()
                restore()
            except BaseException as error:
                self._end_workers(f"it could not be restored: {error!r}")
                raise
            finally:
                self._restoring = None

    def close(self) -> None:
        """End the workers. Pending and later calls raise `EngineError`.

        The last engine also ends the processes that compile grammars. They start again when they are needed.
        """
        if self._pid != os.getpid():  # a forked child: the workers belong to its parent
            return
        self._end_workers("it was closed")
        _open_engines.discard(self)
        if not _open_engines:
            end_grammar_processes()

    def _end_workers(self, why: str) -> None:
        if (loading := self._loading) is not None:
            self._loading = None
            loading.kill()  # the thread that loads sees the closed connections
        if (executor := self._executor) is not None:
            self._break(executor, why)

    def _remove_directory(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.cleanup()

    def _break(self, executor: Executor, why: str) -> None:
        """End the workers and let all pending calls raise."""
        with self._ending:
            with self._lock:
                if self._executor is not executor:
                    return
                self._executor, self._broken = None, why
                calls, self._calls = list(self._calls.values()), {}
            executor.kill()  # before callers wake, so that they find no surviving process
            self._remove_directory()
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
        seed: Any = None,
        generation_config: Any = None,
        gather: bool = False,
        cancellation: Cancellation | None = None,
        joins: bool = False,
        gives_way: bool = False,
        images: tuple[tuple[Any, ...], ...] = (),
        tenant: int = 0,
        goes_on: bool = False,
    ) -> Any:
        """Call a method of the model on all ranks.

        Args:
            streamer: receives the tokens of `generate` in this thread, as they are generated.
            timeout: seconds to wait.
            gather: return the results of all ranks, not only of the rank with the outputs.
            cancellation: cancels the call from another thread.
            joins: compute the call in the running batch.
            gives_way: run steps of the running batch between the tokens of the call.
            images, tenant, goes_on: of a call that joins; see `Request`.

        Raises:
            TimeoutError: it took longer. The call is cancelled.
            CallCancelled: ``cancellation`` cancelled the call.
            EngineError: the workers died or hang.
            ValueError: an argument cannot be sent to the workers.
            Exception: a worker raised it. The worker's traceback is its cause.
        """
        if self._pid != os.getpid():
            raise EngineError("this process is a fork of the process that deployed the model; deploy it here")
        seed = self._seeds.getrandbits(32) if seed is None else seed
        number = next(self._numbers)
        streams = streamer is not None
        options = (gather, generation_config, joins, gives_way, images, tenant, goes_on)
        request = Request(number, method, args, kwargs or {}, seed, streams, *options)
        try:
            data = encode(request, number)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"an argument of {method} cannot be sent to the workers: {error}; functions and classes have to be "
                "importable by name (not lambdas, nor defined inside a function or in the script itself)"
            ) from error
        if SCRIPT.encode() in data:
            check_importable(method, args, kwargs or {})
        call = PendingCall(number, [self._leader] if joins else range(self.ranks))
        with self._lock:  # all ranks get all calls in the same order
            if self._executor is None:
                raise EngineError(f"the deployed model cannot answer: {self._broken}; model.restart() starts it again")
            if self._restoring not in (None, threading.get_ident()):
                raise EngineError("the deployed model cannot answer yet: it is being restarted")
            self._calls[number] = call
            self._executor.broadcast(data)
        cancelled = ("raise", CallCancelled(f"{method} was cancelled"))
        with cancellation.observed(lambda: call.events.put(cancelled)) if cancellation else nullcontext():
            results = self._wait(call, streamer, timeout)
        return results if gather else next((result for result in results if result is not None), None)

    def _wait(self, call: PendingCall, streamer: Any, timeout: float | None) -> list[Any]:
        """Wait for the results by rank. Pass streamed tokens on meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        ended = False
        try:
            while True:
                if streamer is None and timeout is None and len(self._calls) == 1 and not self._receive_lock.locked():
                    self._receive_for(call)
                if self._calls:
                    self._receiver_needed.set()
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
                    streamer.end()  # a thread that reads from it must not hang
            raise

    def _cancel(self, call: PendingCall) -> None:
        with self._lock:
            if call.number in self._calls and self._executor is not None:
                self._executor.broadcast(encode(Cancel(call.number)))

    def health(self, timeout: float = 2.0) -> dict[str, Any]:
        """Ask every worker whether it is alive.

        Returns:
            ``healthy``, ``reason`` (why not), and ``ranks``, one dictionary per rank: ``pid``, ``device``, ``busy``
            (seconds spent in its current call, ``None`` when idle) and ``answered`` (whether it answered in time).
        """
        executor, asked = self._executor, time.monotonic()
        if executor is None or self._restoring is not None:
            return {"healthy": False, "reason": self._broken or "it is being restarted", "ranks": []}
        with self._lock:
            executor.broadcast(encode(Ping()))
        self._receiver_needed.set()
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
        """Return the ``"allocated"`` or ``"reserved"`` bytes by device; on CPU the resident memory of each worker."""
        return dict(self.call("memory", (kind,), gather=True))

    # Receiving --------------------------------------------------------------------------------------------------------

    def _receive_in_background(self, executor: Executor) -> None:
        """Run the receiver thread: receive whenever no caller does, until the workers end."""
        while self._executor is executor:
            announced = self._receiver_needed.wait(RECEIVER_DELAY)
            self._receiver_needed.clear()
            if not announced and time.monotonic() - self._received_at < RECEIVER_DELAY:
                continue  # the next lone call would wait for a thread switch
            if self._receive_lock.acquire(blocking=False):
                try:
                    calls = True
                    while calls and self._executor is executor:
                        self._receive(executor, 0.2 if self._calls else 1.0)
                        # A caller adds its call before it sets the event, so the next line misses no announced call.
                        self._receiver_needed.clear()
                        calls = bool(self._calls)
                finally:
                    self._receive_lock.release()

    def _receive_for(self, call: PendingCall) -> None:
        """Receive in the thread of a lone caller, until its call has an event."""
        # `with`, not `acquire`: an interrupt could come between an acquire and the try block that releases.
        with self._receive_lock:
            spin = self._spin_seconds
            while call.events.empty() and (executor := self._executor) is not None:
                self._receive(executor, 0.2, spin)
                spin = 0.0
            self._received_at = time.monotonic()

    def _receive(self, executor: Executor, timeout: float, spin: float = 0.0) -> None:
        """Wait for messages of the workers and dispatch them to the calls.

        Args:
            spin: initial seconds of busy waiting.
        """
        waiting = True
        try:
            executor.wait(timeout, spin)
            waiting = False
            self._dispatch(executor)
        except BaseException as error:
            if self._executor is not executor and isinstance(error, (OSError, ValueError)):
                return  # another thread has closed the connections
            interrupted = threading.current_thread() is threading.main_thread()  # a signal handler may raise anything
            if not (interrupted and waiting):  # the message in reading is lost
                self._break(executor, f"the messages of the workers cannot be received: {error!r}")
            if interrupted:
                raise

    def _dispatch(self, executor: Executor) -> None:
        """Pass the received messages to their calls. Break the engine if a rank hangs or has died."""
        late = [call for call in list(self._calls.values()) if call.deadline < time.monotonic()]
        if late:
            assert late[0].failure is not None
            rank, failure = late[0].failure
            missing = sorted(late[0].unanswered)
            late[0].fail(executor.pids, "while the others went on")
            why = f"rank {rank} raised {failure.error!r} and ranks {missing} did not end the same call"
            self._break(executor, why)
            return
        for rank, message in executor.receive():
            if message is None:
                if self._executor is executor:
                    self._break(executor, executor.exit_reason(rank))
                return
            self._handle(rank, message, executor.pids)

    def _handle(self, rank: int, message: Any, pids: list[int]) -> None:
        if isinstance(message, Pong):
            self._pongs[rank] = time.monotonic(), message
        elif isinstance(message, Reused):
            self.reused_tokens += message.tokens
        elif isinstance(message, Speculated):
            self.drafted_tokens += message.drafted
            self.accepted_tokens += message.accepted
        elif isinstance(message, Stepped):
            for number, value in message.values:
                if (streaming := self._calls.get(number)) is not None:
                    streaming.stream(value)
        elif (call := self._calls.get(message.number)) is not None and call.add(rank, message):
            del self._calls[call.number]
            call.complete(pids)
