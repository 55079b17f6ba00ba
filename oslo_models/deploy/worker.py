"""The process that computes one rank of a deployed model. It ends when the connection to the application does.

Started as ``python -m oslo_models.deploy.worker FD``: not by `multiprocessing`, which would run the application's own
script again and so ask it for a ``__main__`` guard.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from oslo_models.deploy.connection import WorkerConnection, spare_core
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
    SentOutput,
    Setup,
    Streamed,
    decode,
    encode,
    portable,
)

HANDOVER = 0.05
"""Seconds after which messages are heard while the model computes: no thread slows down calls that take less."""
WAKEFUL = 0.001
"""Seconds that a worker watches for the next call before it sleeps: where calls follow one another, waking up, with
caches that others have used in between, takes longer than all else that a call adds to the model's time."""


class Channel(Protocol):
    """As much of a connection to the application as a worker needs."""

    def recv_bytes(self) -> bytes: ...

    def send_bytes(self, data: bytes, /) -> None: ...


class Worker:
    """One rank: what it was asked, what it is doing, and the model."""

    def __init__(self, connection: Channel, watch: Callable[[float], object] | None = None) -> None:
        """Begin to listen.

        Args:
            watch: waits for at most so many seconds until there is something to hear, without sleeping.
        """
        self.connection, self.watch = connection, watch
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.since: float | None = time.monotonic()
        self.progress = 0
        self.model: Any = None
        self.output_class: Any = None  # transformers' ModelOutput, which is imported when there is work
        self._sending, self._hearing = threading.Lock(), threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: tuple[Any, ...], number: int = 0) -> None:
        data = encode(message, number)
        with self._sending:
            self.connection.send_bytes(data)

    def _listen(self) -> None:
        """Hear the application while the main thread computes for long; when it does not, it hears for itself."""
        while True:
            if self.since is not None:
                with self._hearing:
                    while not self._hear():
                        pass
            time.sleep(HANDOVER)

    def _hear(self) -> bool:
        """Take one message; whether the main thread is to act on it. The end of the connection is that of all."""
        try:
            message = decode(self.connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if isinstance(message, Ping):
            self.send(Pong(self.since and time.monotonic() - self.since, self.progress))
        elif isinstance(message, Cancel):
            self.cancelled.add(message.number)
        else:
            self.inbox.put(message)
            return True
        return False

    def _next(self) -> Any:
        """What the main thread is to do next."""
        while self.inbox.empty() and self._hearing.acquire(blocking=False):
            try:
                if self.watch is not None and self.model is not None:
                    self.watch(WAKEFUL)
                self._hear()
            finally:
                self._hearing.release()
        return self.inbox.get()

    def run(self) -> None:
        setup = self._next()
        self.rank = setup.rank
        sys.path[:] = setup.path
        try:
            self._load(setup)
        except BaseException as error:  # noqa: BLE001  everything is reported
            self.send(Failure(-1, portable(error), traceback.format_exc()))
            return
        self.answers = setup.rank == self.model.mesh.tp.size * (self.model.mesh.pp.size - 1)
        self.send(Ready(str(self.device)))
        while True:
            self.since = None
            request = self._next()
            self.since = time.monotonic()
            self._answer(request)

    def _load(self, setup: Setup) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from transformers.utils import ModelOutput
        from transformers.utils.logging import set_tqdm_hook

        self.output_class = ModelOutput
        torch.set_num_threads(setup.threads)
        if not spare_core(setup.world_size):  # the application needs it
            self.watch = None
        torch.set_grad_enabled(False)
        if setup.world_size > 1:
            if setup.rank == 0:
                listener = socket.create_server((setup.host, 0))  # a store by itself would listen to all networks
                port = listener.getsockname()[1]
                options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
                store = TCPStore(setup.host, port, setup.world_size, is_master=True, **options)
                self.send(Listening(port))
            else:
                join = self._next()
                assert isinstance(join, Join)
                store = TCPStore(setup.host, join.port, setup.world_size, is_master=False)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world_size)
        cls, constructor, args, kwargs = pickle.loads(setup.make)
        set_tqdm_hook(self._progress)
        self.model = getattr(cls, constructor)(*args, **kwargs).eval()
        self.device = self.model.device  # which a module has to look for each time
        set_tqdm_hook(None)

    def _progress(self, bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What transformers gets in place of a progress bar: the application shows it."""
        if not args or not isinstance(args[0], Sized):
            return bar(*args, **kwargs)
        return self._counted(args[0])

    def _counted(self, items: Any) -> Iterator[Any]:
        told = 0.0
        for number, item in enumerate(items, 1):
            yield item
            if number == len(items) or time.monotonic() > told + 0.1:
                told = time.monotonic()
                self.send(Loading(number, len(items)))

    def _answer(self, request: Request | Failure) -> None:
        if isinstance(request, Failure):  # what was asked could not be read
            self.send(request, request.number)
            return
        try:
            result = self._call(request)
            if isinstance(result, self.output_class):
                result = SentOutput(result)
            self.send(Reply(request.number, result if self.answers or request.gather else None), request.number)
        except BaseException as error:  # noqa: BLE001  everything is reported
            from oslo_models.pipeline.stage_runner import OtherStageError

            secondary = isinstance(error, OtherStageError)
            failure = Failure(request.number, portable(error), traceback.format_exc(), secondary)
            self.send(failure, request.number)
        self.cancelled.discard(request.number)

    def _call(self, request: Request) -> Any:
        _seed(request.seed, self.device, only_torch=request.method == "forward")
        if request.generation_config is not None:
            self.model.generation_config = request.generation_config
        if self.model.pipeline is not None:  # what a call before this one has left undone is no concern of this one
            self.model.pipeline.runner.abandoned = False
        kwargs = dict(request.kwargs)
        if request.method == "memory":
            return self._memory(*request.args)
        if request.method == "generate":
            return self._generate(request, kwargs)
        if request.method == "forward":
            return self._forward(request.args, kwargs)
        result = getattr(self.model, request.method)(*request.args, **kwargs)
        return None if result is self.model else result

    def _generate(self, request: Request, kwargs: dict[str, Any]) -> Any:
        from transformers import StoppingCriteriaList

        criteria = [*(kwargs.pop("stopping_criteria", None) or []), self._stops(request.number)]
        if request.stream:  # on every rank, so that whatever transformers says to a streamer it says on all
            send = partial(self._stream, request.number) if self.answers else lambda value: None
            kwargs["streamer"] = _Relay(send)
        kwargs = _on_device(kwargs, self.device)
        args = _on_device(request.args, self.device)
        return self.model.generate(*args, **kwargs, stopping_criteria=StoppingCriteriaList(criteria))

    def _stream(self, number: int, value: Any) -> None:
        self.send(Streamed(number, value), number)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = (_on_device(given, self.device) for given in (args, kwargs))
        if not self.model.is_pipeline_parallelized():
            return self.model(*args, **kwargs)
        from torch import Tensor

        rows = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        self.model.set_micro_batch_size(rows[0] if rows else 1)
        (output,) = self.model(*args, **kwargs)
        return output

    def _memory(self, kind: str) -> tuple[str, Any]:
        """What this rank's device holds: bytes, or a text."""
        import torch

        device = self.model.device
        if device.type == "cuda":
            measure = {"allocated": torch.cuda.memory_allocated, "reserved": torch.cuda.memory_reserved}
            return str(device), measure.get(kind, torch.cuda.memory_summary)(device)
        status = Path("/proc/self/status").read_text()
        resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
        return f"cpu:{self.rank}", status if kind == "summary" else resident

    def _stops(self, number: int) -> Callable[..., Any]:
        """A stopping criterion: the application has cancelled the call. All ranks see it at the same token."""
        import torch

        from oslo_models.distributed.collectives import all_reduce

        def stops(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.progress += 1
            # One rank may have heard of it a token before the others.
            flag = all_reduce(self.model.mesh.model, torch.tensor([float(number in self.cancelled)]))
            return torch.full((len(input_ids),), bool(flag), device=input_ids.device)

        return stops


def _seed(seed: int, device: Any, only_torch: bool) -> None:
    """As transformers' ``set_seed``, which seeds devices that nobody uses and takes as long as a small model."""
    import torch

    if not only_torch:
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


class _Relay:
    """A streamer that sends what it is given."""

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send

    def put(self, value: Any) -> None:
        self._send(value)

    def end(self) -> None:
        self._send(None)


def _on_device(values: Any, device: Any) -> Any:
    if device.type == "cpu":  # where messages bring them
        return values
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


class _Log(io.TextIOWrapper):
    """Standard output or error. A disk that is full of logs is no reason not to answer."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def main() -> None:
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            setattr(sys, name, _Log(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the application, which decides what it means
    line = WorkerConnection(socket.socket(fileno=int(sys.argv[1])))
    Worker(line, line.watch).run()


if __name__ == "__main__":
    main()
