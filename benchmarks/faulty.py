"""Faulty workers and applications of `benchmarks.faults`. This is a separate module, since they import it by name.

It also starts workers of a launcher quickly: a server that has imported torch forks them.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, LogitsProcessor

from oslo_models import GPT2LMHeadModel
from oslo_models.deploy import options as serving
from oslo_models.deploy.connection import WorkerConnection
from oslo_models.deploy.process_executor import ProcessExecutor
from oslo_models.deploy.worker import Worker

CONFIG = GPT2Config(
    **{"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 512},
    **{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
)
LONG = {"max_new_tokens": 400, "min_new_tokens": 400}


def start_forked_worker(
    theirs: socket.socket, local_rank: int, loopback: bool = True, secret: str | None = None
) -> Any:
    """As `oslo_models.deploy.process_executor.start_worker`."""
    conn = Connection(os.dup(theirs.fileno()))
    context = multiprocessing.get_context("forkserver")
    process: Any = context.Process(target=_work, args=(conn, local_rank, secret), daemon=True)
    process.start()
    conn.close()
    return _Forked(process)


class _Forked:
    """A forked process as if `subprocess` had started it."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid, self.kill = process, process.pid, process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode


def _work(conn: Connection, local_rank: int, secret: str | None) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update({"LOCAL_RANK": str(local_rank), "GLOO_SOCKET_IFNAME": "lo"})
    Worker(WorkerConnection(socket.socket(fileno=os.dup(conn.fileno()))), secret=secret).run()


def server_address() -> Any:
    """Return the address of the fork server of this process."""
    multiprocessing.forkserver.ensure_running()
    return multiprocessing.forkserver._forkserver._forkserver_address


def use_server(address: Any) -> None:
    """Make this process use the fork server that forked it. Otherwise it would start a second server."""
    server = multiprocessing.forkserver._forkserver
    server._forkserver_address, server.ensure_running = address, lambda: None


class Trouble(LogitsProcessor):
    """Raises or sleeps at every token, on one rank."""

    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if dist.get_rank() == self.rank:
            if self.what == "raise":
                raise MemoryError("no room for the cache")
            time.sleep(0.05)
        return scores


class Collected:
    """A streamer with a reader that leaves after a given number of tokens."""

    def __init__(self, limit: float = float("inf")) -> None:
        self.tokens: list[int] = []
        self.limit, self.ended = limit, False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) > self.limit:
            raise BrokenPipeError("the reader has left")

    def end(self) -> None:
        self.ended = True


def application(said: Connection, checkpoint: Path, when: str) -> None:
    """A program that deploys a model. It reports the ids of the workers, then ``when``: loading, in a call, or idle."""
    with suppress(PermissionError):
        os.setpgid(0, 0)  # Ctrl-C in a terminal goes to the whole process group
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(count: int) -> Any:
        made = ProcessExecutor(count)
        said.send(made.pids)
        return made

    serving.ProcessExecutor = start  # type: ignore[assignment, misc]
    model = GPT2LMHeadModel.from_pretrained_with_parallel(checkpoint, tensor_parallel_size=2, deploy=True)
    said.send("loaded")
    if when == "call":
        model.generate(torch.tensor([[5, 6, 7]]), **LONG, logits_processor=[Trouble("sleep", 0)])
    time.sleep(60)
