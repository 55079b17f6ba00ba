"""The process that computes one rank of a deployed model. It exits when the connection to the application closes.

Forked by `fork_server`, or started as ``python -m oslo_models.deploy.worker FD``: not by `multiprocessing`, which would
run the application's own script again and so require a ``__main__`` guard in it.
"""

from __future__ import annotations

import io
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from oslo_models.deploy.busy_polling import has_spare_core
from oslo_models.deploy.connection import WorkerConnection
from oslo_models.deploy.errors import RanksDisagree
from oslo_models.deploy.messages import Cancel, Failure, Join, Ping, Pong, Ready, Reply, Request, Setup
from oslo_models.deploy.process_executor import SECRET_VARIABLE
from oslo_models.deploy.serialization import SentOutput, decode, encode, portable

if TYPE_CHECKING:
    from oslo_models.deploy.model_runner import ModelRunner

LISTENER_INTERVAL = 0.05
"""Seconds of a call after which the listener thread receives messages. Shorter calls never switch to it."""
SPIN_SECONDS = 0.001
"""Seconds that a worker polls for the next call before it sleeps, if a core is free for it (see `BusyPoll`)."""


class Channel(Protocol):
    """The part of a connection to the application that a worker needs."""

    def recv_bytes(self) -> bytes: ...

    def send_bytes(self, data: bytes, /) -> None: ...


class Worker:
    """Receives calls, runs them on the model, and answers.

    One thread at a time receives messages and holds ``_receive_lock``. The main thread receives while it is idle, so
    that a call needs no thread switch. The listener thread receives during long calls, so that `Ping` and `Cancel` are
    handled at once. Receiving in the main thread saves 135 us of a call of 940 us (1.14 times as long without,
    quartiles 1.12 to 1.16; with two ranks no difference was seen), measured as `BusyPoll` says.

    Args:
        spin: waits for a message without sleeping, for at most the given seconds.
        secret: of the deployment, from the parent process.
        has_arrived: returns whether a message has arrived. Without it, the listener thread receives all messages of the
            running batch, and a call of one token costs four more thread switches.
    """

    def __init__(
        self,
        connection: Channel,
        spin: Callable[[float], object] | None = None,
        secret: str | None = None,
        has_arrived: Callable[[], bool] | None = None,
    ) -> None:
        self.connection, self.spin, self._secret, self._has_arrived = connection, spin, secret, has_arrived
        self._directory: str | None = None
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy_since: float | None = time.monotonic()
        self.runner: ModelRunner | None = None  # once it is loaded
        self._cancelled: set[int] = set()
        self._batch_runs, self._listener_needed = False, threading.Event()
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: tuple[Any, ...], number: int = 0) -> None:
        data = encode(message, number)
        with self._send_lock:
            self.connection.send_bytes(data)

    def _listen(self) -> None:
        """Run the listener thread: receive while the main thread is busy."""
        while True:
            announced = self._listener_needed.wait(LISTENER_INTERVAL)
            if announced:
                self._listener_needed.clear()
            if self._is_busy(0.0 if announced else LISTENER_INTERVAL):
                with self._receive_lock:
                    while not self._receive() or self._batch_runs:
                        pass

    def _is_busy(self, seconds: float) -> bool:
        """Return whether the current call has run for longer than ``seconds``."""
        busy_since = self.busy_since
        return busy_since is not None and time.monotonic() - busy_since > seconds

    def _receive(self) -> bool:
        """Receive one message. Return whether it is for the main thread. Exit when the connection closes."""
        try:
            message = decode(self.connection.recv_bytes())
        except (EOFError, OSError):
            if self._directory is not None:  # a killed application has not removed it
                shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(0)
        if isinstance(message, Ping):
            busy = self.busy_since and time.monotonic() - self.busy_since
            self.send(Pong(busy, self.runner.progress if self.runner else 0))
        elif isinstance(message, Cancel):
            self._cancelled.add(message.number)
        else:
            self.inbox.put(message)
            return True
        return False

    def _next(self) -> Any:
        """Wait for the next message for the main thread."""
        while self.inbox.empty() and self._receive_lock.acquire(blocking=False):
            try:
                if self.spin is not None and self.runner is not None:
                    self.spin(SPIN_SECONDS)
                self._receive()
            finally:
                self._receive_lock.release()
        return self.inbox.get()

    def get_nowait(self) -> Any:
        """Return the next message for the main thread. Receives in this thread unless the listener thread does.

        Raises:
            queue.Empty: none has arrived.
        """
        if self._has_arrived is not None and self.inbox.empty() and self._receive_lock.acquire(blocking=False):
            try:
                while self._has_arrived() and not self._receive():
                    pass
            finally:
                self._receive_lock.release()
        return self.inbox.get_nowait()

    def get(self) -> Any:
        """Wait for the next message for the main thread."""
        return self.inbox.get() if self._has_arrived is None else self._next()

    def run(self) -> None:
        """Load the model, then answer calls until the connection closes."""
        setup = self._next()
        sys.path[:] = setup.path
        try:
            self._load(setup)
        except BaseException as error:  # noqa: BLE001  everything is reported
            self.send(Failure(-1, portable(error), traceback.format_exc()))
            return
        assert self.runner is not None
        self.send(Ready(str(self.runner.device)))
        while True:
            self.busy_since = None
            request = self._next()
            self.busy_since = time.monotonic()
            if isinstance(request, Request) and (request.joins or request.gives_way):
                self._run_batch(request, self.runner)
            else:
                self._answer(request, self.runner)

    def _run_batch(self, first: Request, runner: ModelRunner) -> None:
        """Compute the running batch until it is empty. Receive messages between its steps."""
        from oslo_models.deploy.running_batch.loop import Messages

        self._batch_runs = True
        if self._has_arrived is None:
            self._listener_needed.set()
        try:
            runner.batch.run(first, Messages(self, lambda message: self._answer(message, runner)))
        finally:
            self._batch_runs = False

    def _load(self, setup: Setup) -> None:
        from oslo_models.deploy.model_runner import ModelRunner

        self._directory = setup.directory
        if not has_spare_core(setup.world_size):  # the application needs it
            self.spin = None
        self.runner = ModelRunner(setup, self.send, self._next_join, self._cancelled, self._secret)

    def _next_join(self) -> Join:
        join = self._next()
        assert isinstance(join, Join)
        return join

    def _answer(self, request: Request | Failure, runner: ModelRunner) -> None:
        from transformers.utils import ModelOutput

        if isinstance(request, Failure):  # the request could not be decoded
            self.send(request, request.number)
            return
        try:
            result = runner.call(request)
            if isinstance(result, ModelOutput):
                result = SentOutput(result)
            self.send(Reply(request.number, result if runner.has_outputs or request.gather else None), request.number)
        except RanksDisagree:
            raise
        except BaseException as error:  # noqa: BLE001  everything is reported
            from oslo_models.distributed.stopping import OtherRankError

            secondary = isinstance(error, OtherRankError)
            failure = Failure(request.number, portable(error), traceback.format_exc(), secondary)
            self.send(failure, request.number)
        self._cancelled.discard(request.number)


class _Log(io.TextIOWrapper):
    """Standard output or error that ignores write errors, so that a full disk does not stop the worker."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def work(descriptor: int) -> None:
    """Run a worker in this process.

    Args:
        descriptor: of the connection to the application.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        if (stream := getattr(sys, name)) is not None:
            # Replaced, because a copied application's streams assume the file type that they had at its start.
            output = open(number, "wb", closefd=False)  # noqa: SIM115
            setattr(sys, name, _Log(output, stream.encoding, "backslashreplace", line_buffering=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the application handles Ctrl-C
    connection = WorkerConnection(socket.socket(fileno=descriptor))
    Worker(connection, connection.spin, os.environ.pop(SECRET_VARIABLE, None), connection.has_arrived).run()


if __name__ == "__main__":
    work(int(sys.argv[1]))
