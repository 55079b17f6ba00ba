"""One pool of worker processes for a whole test run: `Pool.run` calls a function on every rank of a fresh gloo group.

Starting a Python with torch and transformers costs seconds, so the workers are forked from one warm server and kept.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any

from oslo_models.registry import NEWER

from support import ROOT
from support.pool_worker import WORN, dumps, environment, serve
from support.ports import free_port, shorten_socket_paths

PRELOAD = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.tensor",
    "torch._inductor.compile_fx",  # a decorator of DeepSpeed imports it with its dependencies
    "torch._dynamo.repro.after_dynamo",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "oslo_models.integrations.trainer",  # imports transformers' Trainer and accelerate
    "support.preloaded_deepspeed",
    # all architectures: tests of every model import them. Preloading costs 4 s once; otherwise, each worker would spend
    # 4 s
    *sorted(
        f"oslo_models.models.{path.stem}"
        for path in (ROOT / "oslo_models" / "models").glob("[a-z]*.py")
        if path.stem not in NEWER
    ),
)
TIMEOUT = 2.0
"""Seconds for the other ranks to finish after a failure of one rank; then its connections are closed."""
GRACE = 60.0
"""Further seconds for the ranks, and seconds to leave the process group, before they are killed."""
ERRORS = 3000
"""Characters of a dead worker's standard error in the report."""

Raises = type[BaseException] | tuple[type[BaseException], ...]


class WorkerError(Exception):
    """Some rank raised, hung or died.

    Attributes:
        failures: traceback or message of each failed rank, in order of arrival.
    """

    def __init__(self, function: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        ranks = ", ".join(str(rank) for rank in sorted(failures))
        parts = [f"---- rank {rank}\n{text.rstrip()}" for rank, text in failures.items()]
        super().__init__("\n".join([f"{function} failed on rank {ranks}", *parts]))


class Pool:
    """Worker processes, forked on demand and kept until `close`.

    Args:
        size: how many workers the first run starts.
        limit: how many there may be.
        preload: modules that the server imports once, before it forks workers.
    """

    def __init__(self, size: int = 4, limit: int = 8, preload: Sequence[str] = PRELOAD) -> None:
        self.size, self.limit = size, limit
        shorten_socket_paths()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._folder = Path(tempfile.mkdtemp(prefix="oslo-models-pool-"))
        self._workers: list[_Worker] = []
        self._runs = 0
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [worker.pid for worker in self._workers]

    def start(self, count: int) -> None:
        """Start workers until at least ``count`` are alive."""
        if not 1 <= count <= self.limit:
            raise ValueError(f"{count} ranks asked for; the pool has 1 to {self.limit}")
        for worker in self._workers[:]:
            if not worker.process.is_alive():
                self._discard(worker)
        while len(self._workers) < count:
            self._workers.append(_Worker(self._context, self._folder))

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 300,
        expect: Raises | None = None,
        env: bool = False,
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank of a fresh process group and return the results by rank.

        Args:
            world_size: number of ranks, 1 to ``limit``.
            function: a module-level function of a module in ``tests/``.
            args: copied to every rank. Tensors arrive as plain CPU tensors, parameters as parameters; so do results.
            timeout: seconds after which ranks that have not finished are killed.
            expect: exception type that every rank has to raise; the exceptions are returned.
            env: set a launcher's variables (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` ...) and start no group.

        Raises:
            WorkerError: some rank raised, hung or died.
            AssertionError: with ``expect``, some rank did not raise that.
        """
        body = dumps((function, args))
        self.start(max(world_size, self.size))
        self._runs += 1
        job: dict[str, Any] = {
            "world_size": world_size,
            "timeout": timeout,
            "store": str(self._folder / f"store-{self._runs}"),
            "port": free_port() if env else None,
            "path": list(sys.path),
            "folder": os.getcwd(),
        }
        call = _Call(self._workers[:world_size], timeout)
        try:
            call.send(job, body)
            call.collect()
        finally:
            for worker in call.gang:
                if call.broken or worker.worn:
                    self._discard(worker)
            with suppress(FileNotFoundError):
                os.unlink(job["store"])
        return call.outcome(f"{function.__module__}.{function.__qualname__}", expect)

    def close(self) -> None:
        """End every worker."""
        while self._workers:
            self._discard(self._workers[-1])
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _discard(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)


class _Worker:
    """A worker process as the parent sees it."""

    def __init__(self, context: Any, folder: Path) -> None:
        self.worn = False
        self.conn, theirs = context.Pipe()
        handle, stacks = tempfile.mkstemp(dir=folder, suffix=".stack")
        os.close(handle)
        self.stack_file, self.error_file = Path(stacks), Path(f"{stacks}.err")
        self.process = context.Process(target=serve, args=(theirs, stacks, str(self.error_file)))
        with environment(worker_environment()):  # the first worker starts the server; all workers inherit it
            self.process.start()
        theirs.close()
        self.pid: int = self.process.pid

    def stack(self) -> str:
        """Return the current stack of the process."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
        for _ in range(200):
            time.sleep(0.05)
            if self.stack_file.stat().st_size:
                time.sleep(0.05)  # until the stack is written completely
                return self.stack_file.read_text()
        return "(it did not show its stack)"

    def last_words(self) -> str:
        """Return the stack of a crash, and the last C++ messages on standard error."""
        errors = self.error_file.read_text(errors="replace") if self.error_file.exists() else ""
        return f"{self.stack_file.read_text()}{errors[-ERRORS:]}"

    def kill(self) -> None:
        """Kill the worker and its child processes (it leads a separate process group), and wait for its end."""
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.process.close()
        self.conn.close()
        self.stack_file.unlink(missing_ok=True)
        self.error_file.unlink(missing_ok=True)


class _Call:
    """One run in the parent: the messages from each rank so far."""

    def __init__(self, gang: list[_Worker], timeout: float) -> None:
        self.gang, self.timeout = gang, timeout
        self.results: dict[int, Any] = {}
        self.raised: dict[int, BaseException] = {}
        self.failures: dict[int, str] = {}
        self.died = False
        self.broken = True  # until every rank has said that it is ready for another run

    def send(self, job: dict[str, Any], body: bytes) -> None:
        for rank, worker in enumerate(self.gang):
            with suppress(BrokenPipeError):  # the worker died: its sentinel reports it
                worker.conn.send_bytes(pickle.dumps({**job, "rank": rank}))
                worker.conn.send_bytes(body)

    def collect(self) -> None:
        """Wait for the outcome of every rank, and for all ranks to leave the process group."""
        everyone = frozenset(range(len(self.gang)))
        silent, released = set(everyone), frozenset[int]()
        self._hear(silent, self.timeout, until_failure=True)
        if silent and self.failures and not self.died:
            self._hear(silent, TIMEOUT)
            released = everyone - silent
            self._release(released)  # closes their connections, which frees ranks that wait for them in a collective
            self._hear(silent, GRACE)
        if self.died:
            return
        if silent:
            for rank in sorted(silent):
                since = f"{TIMEOUT + GRACE:g} s after another rank failed" if self.failures else f"{self.timeout:g} s"
                self.failures[rank] = f"did not finish within {since}; killed here:\n{self.gang[rank].stack()}"
            return
        self._release(everyone - released)
        leaving = set(everyone)
        self._hear(leaving, GRACE)
        for rank in sorted(leaving):
            self.failures[rank] = f"did not leave the process group; killed here:\n{self.gang[rank].stack()}"
        self.broken = self.died or bool(leaving)

    def outcome(self, name: str, expect: Raises | None) -> list[Any]:
        ranks = range(len(self.gang))
        if expect is None:
            if self.failures:
                raise WorkerError(name, self.failures)
            return [self.results[rank] for rank in ranks]
        if all(isinstance(self.raised.get(rank), expect) for rank in ranks):
            return [self.raised[rank] for rank in ranks]
        happened = {rank: self.failures.get(rank, f"returned {self.results.get(rank)!r}") for rank in ranks}
        raise AssertionError(f"every rank should have raised {expect}:\n{WorkerError(name, happened)}")

    def _release(self, ranks: Collection[int]) -> None:
        for rank in ranks:
            with suppress(BrokenPipeError):
                self.gang[rank].conn.send_bytes(b"release")

    def _hear(self, pending: set[int], seconds: float, until_failure: bool = False) -> None:
        """Take one message from each of the ``pending`` ranks, as long as time allows and none of them dies."""
        deadline = time.monotonic() + seconds
        while pending and not self.died and not (until_failure and self.failures):
            sources: dict[Any, int] = {}
            for rank in pending:
                sources[self.gang[rank].conn] = rank
                sources[self.gang[rank].process.sentinel] = rank
            ready = connection.wait(list(sources), max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for rank in dict.fromkeys(sources[source] for source in ready):
                pending.discard(rank)
                self._take(rank)

    def _take(self, rank: int) -> None:
        worker = self.gang[rank]
        try:
            message = worker.conn.recv_bytes()
        except (EOFError, OSError):
            worker.process.join()
            self.died = True
            died = f"its process (pid {worker.pid}) died with exit code {worker.process.exitcode}"
            said = self.failures.get(rank, "")
            self.failures[rank] = f"{died}\n{worker.last_words()}{said}"
            return
        if message == WORN:
            worker.worn = True
        elif message:  # an empty message says "I have left the process group"
            result, exception, text = pickle.loads(message)
            if exception is None:
                self.results[rank] = result
            else:
                self.raised[rank], self.failures[rank] = exception, text


def worker_environment() -> dict[str, str]:
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "CUDA_VISIBLE_DEVICES": "",  # ranks on gloo compute on the CPU
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
