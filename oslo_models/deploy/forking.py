"""The application's side of `fork_server`: starts it, requests forks, and receives the exit status of workers."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

from oslo_models.deploy.fork_server import LENGTH, NUMBER, USABLE, ForkOrder
from oslo_models.deploy.process_copy import ProcessCopy, copy_this_process
from oslo_models.deploy.worker_output import worker_output
from oslo_models.locking import locked_property
from oslo_models.starting import python_module

MODULES = (
    "oslo_models.modeling.base",
    "oslo_models.deploy.model_runner",
    "oslo_models.deploy.running_batch.loop",
    "oslo_models.distributed.directory_store",
    "transformers.generation.utils",
)
"""Modules that every worker needs. They import torch and transformers."""
_NOT_AT_IMPORT = ("LOCAL_RANK", "PYTHONPATH", "PYTEST_CURRENT_TEST")
START_SECONDS = 300.0
"""Time limit for the fork server to import its modules."""
ANSWER_SECONDS = 10.0
"""Time limit for an answer of the fork server. A slower server counts as hung and is replaced."""
Environment = dict[str, str]
Server = subprocess.Popen[bytes] | ProcessCopy


def start_fork_server(environment: Environment, modules: Iterable[str] = ()) -> None:
    """Start the fork server of this process if it does not run. Does not wait for its imports.

    Args:
        environment: of a worker.
        modules: further modules to import, in addition to `MODULES`.
    """
    if is_available():
        _servers(os.getpid()).start(environment, modules)


def fork_worker(connection: socket.socket, environment: Environment) -> ForkedProcess | None:
    """Let the fork server of this process fork a worker. Start the server if it does not run.

    Args:
        connection: the worker's end.

    Returns:
        ``None`` if no fork server can be used. Then start the worker as a new process.
    """
    return _servers(os.getpid()).fork(connection, environment) if is_available() else None


def is_available() -> bool:
    """Return whether this system supports the fork server. It needs Linux for process file descriptors (pidfd)."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class ForkServer:
    """A running fork server.

    Args:
        environment: the environment at its start, which its imported modules have read.
        control: the connection to the server.
        process: the server process.
    """

    def __init__(self, environment: Environment, control: socket.socket, process: Server) -> None:
        self.environment, self._control, self._process = environment, control, process
        self._is_closed = threading.Event()
        reap = (process, self._is_closed)
        threading.Thread(target=_reap, args=reap, daemon=True, name="oslo-deploy-reap").start()

    @locked_property
    def is_usable(self) -> bool:
        """Whether a forked worker is equivalent to a new process. Waits until the server has imported its modules."""
        self._control.settimeout(START_SECONDS)
        try:
            return self._control.recv(1) == USABLE
        except OSError:
            self._process.kill()  # it hangs, or has ended
        return False

    def fork(self, connection: socket.socket, environment: Environment) -> ForkedProcess:
        """Fork a worker.

        Raises:
            ConnectionError: the server has ended.
            OSError: the server cannot fork.
        """
        body = json.dumps(ForkOrder(environment, os.getcwd())).encode()
        news, theirs = socket.socketpair()
        news.settimeout(ANSWER_SECONDS)
        self._control.settimeout(ANSWER_SECONDS)
        with theirs, open(os.devnull, "wb") as nowhere:
            output = [descriptor if _is_open(descriptor) else nowhere.fileno() for descriptor in worker_output()]
            descriptors = [connection.fileno(), theirs.fileno(), *output]
            socket.send_fds(self._control, [LENGTH.pack(len(body))], descriptors)
            self._control.sendall(body)
        try:
            data, received, _, _ = socket.recv_fds(news, NUMBER.size, 1)
        except TimeoutError:  # it hangs
            self._process.kill()
            data, received = b"", []
        number = NUMBER.unpack(data)[0] if data else None
        if number is None or not received:
            news.close()
            raise ConnectionError("the fork server has ended") if number is None else OSError(-number, "cannot fork")
        return ForkedProcess(number, received[0], news)

    def close(self) -> None:
        """Let the server end after its last worker."""
        self._control.close()
        self._is_closed.set()
        self._process.send_signal(signal.SIGCONT)


def _reap(server: Server, is_closed: threading.Event) -> None:
    """Wait until a server has ended. Continue a stopped server if it is disconnected, so that it can end."""
    try:
        handle = os.pidfd_open(server.pid)
    except ProcessLookupError:  # the application waits for all of its children
        return
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        while not ended.poll(ANSWER_SECONDS * 1e3):
            if is_closed.is_set():
                server.send_signal(signal.SIGCONT)
    finally:
        os.close(handle)
    server.wait()


class _Servers:
    """The fork server of a process: one at a time, for all models."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._server: ForkServer | None = None

    def start(self, environment: Environment, modules: Iterable[str] = ()) -> ForkServer:
        with self._lock:
            if self._server is not None and self._server.environment != _at_import(environment):
                self.discard()
            if self._server is None:
                self._server = _start(environment, [*MODULES, *modules])
            return self._server

    def fork(self, connection: socket.socket, environment: Environment) -> ForkedProcess | None:
        with self._lock:
            for _ in range(2):  # the server may have been killed
                server = self.start(environment)
                try:
                    return server.fork(connection, environment) if server.is_usable else None
                except ConnectionError:
                    self.discard()
                except BaseException:  # an order that was interrupted may have been sent in part
                    self.discard()
                    raise
            return None

    def discard(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


@functools.cache
def _servers(pid: int) -> _Servers:
    """Return the servers of a process. A forked child does not share its parent's server."""
    return _Servers()


def _start(environment: Environment, modules: Iterable[str]) -> ForkServer:
    ours, theirs = socket.socketpair()
    ours.settimeout(None)  # overrides the application's default timeout
    theirs.settimeout(None)
    with theirs:
        process = copy_this_process(theirs, modules) or _new_process(theirs, environment, modules)
    return ForkServer(_at_import(environment), ours, process)


def _new_process(theirs: socket.socket, environment: Environment, modules: Iterable[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_module("oslo_models.deploy.fork_server", str(theirs.fileno()), *modules),
        # Otherwise torch initialises the driver when a module asks for GPUs. Forked workers could not use them then.
        env={**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C in a terminal is for the application only
    )


def _at_import(environment: Environment) -> Environment:
    """Return the variables that modules may read at import. A server with other values has to be replaced."""
    return {key: value for key, value in environment.items() if key not in _NOT_AT_IMPORT}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


class ForkedProcess:
    """A worker process, child of the fork server, with an interface like ``subprocess.Popen``.

    Args:
        handle: the process file descriptor (pidfd). It stays valid if the process id is reused.
        news: the socket on which the server reports the exit status.
    """

    def __init__(self, pid: int, handle: int, news: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._handle, self._news = handle, news
        self._lock = threading.Lock()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the worker has ended.

        Returns:
            Its exit code; ``None`` if the fork server, which collects it, has ended too.

        Raises:
            TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        if not ended.poll(None if timeout is None else timeout * 1e3):
            raise subprocess.TimeoutExpired("the worker", timeout or 0.0)
        with self._lock, suppress(TimeoutError):  # the fork server hangs
            if self.returncode is None and (data := self._news.recv(NUMBER.size)):
                self.returncode = os.waitstatus_to_exitcode(NUMBER.unpack(data)[0])
        return self.returncode

    def __del__(self) -> None:
        os.close(self._handle)
