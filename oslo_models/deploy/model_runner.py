"""One rank of a model in a worker process: loads the model and runs its calls."""

from __future__ import annotations

import hmac
import pickle
import random
import socket
import time
from collections.abc import Callable, Container, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oslo_models.contracts import require
from oslo_models.deploy.adapter_switch import AdapterSwitch
from oslo_models.deploy.full_state import held_part, held_tensors
from oslo_models.deploy.messages import Join, Listening, Loading, Request, Setup, Streamed
from oslo_models.locking import locked_property
from oslo_models.sharding.model_protocol import TransformersModel

if TYPE_CHECKING:
    from torch import Tensor

    from oslo_models.deploy.running_batch.loop import RunningBatch
    from oslo_models.deploy.running_batch.plan_channel import PlanChannel

# torch and transformers take seconds to import: only the functions that need them do so, after the worker listens.

Send = Callable[[tuple[Any, ...], int], None]


class ModelRunner:
    """Runs the part of a model on one rank.

    Args:
        send: sends a message about a call to the application.
        join: waits for the `Join` message with the store's port on rank 0.
        cancelled: numbers of the calls to end at the next token. Another thread changes it.
        secret: of the deployment, if it has one.

    Attributes:
        has_outputs: whether this rank returns the results of calls. It is the first rank of the last pipeline stage.
        progress: the number of generated tokens.
    """

    def __init__(
        self,
        setup: Setup,
        send: Send,
        join: Callable[[], Join],
        cancelled: Container[int],
        secret: str | None = None,
    ) -> None:
        import torch
        from transformers.utils.logging import set_tqdm_hook

        from oslo_models.distributed.object_exchange import authenticate_objects

        self.rank, self._send = setup.rank, send
        self.progress, self._cancelled = 0, cancelled
        torch.set_num_threads(setup.threads)
        torch.set_grad_enabled(False)
        if setup.world_size > 1:
            authenticate_objects(hmac.digest((secret or "").strip().encode(), setup.salt, "sha256"))
            self._store = _start_process_group(setup, send, join)  # kept alive, see `DirectoryStore`
        cls, constructor, args, kwargs = pickle.loads(setup.make)
        set_tqdm_hook(self._progress_hook)
        self.model = getattr(cls, constructor)(*args, **kwargs).eval()
        set_tqdm_hook(None)
        self._adapter = AdapterSwitch(self.model)
        self.device = self.model.device  # cached: a module searches its parameters on each access
        leader = self.model.mesh.tp.size * (self.model.mesh.pp.size - 1)
        self.has_outputs = setup.rank == leader
        self._setup, self._leader = setup, leader
        self._draft_model = self._load_draft_model(setup.limits.draft_model) if self.has_outputs else None

    def _load_draft_model(self, name: str) -> Any:
        """Return the full model that drafts tokens; ``None`` without a name."""
        if not name:
            return None
        from oslo_models.deploy.running_batch.draft_loading import load_draft_model

        return load_draft_model(name, self.model.dtype, self.device)

    @locked_property
    def batch(self) -> RunningBatch:
        """The running batch, created when the first call joins."""
        from oslo_models.deploy.running_batch.loop import RunningBatch

        require("deploy.running_batch")
        stages = self.model.mesh.pp.size if self._setup.directory is not None else 1
        channel, limits = self._plan_channel(stages), self._setup.limits
        cancelled: Any = self._cancelled
        report = (self._send, cancelled, self._count_token)
        return RunningBatch(self.model, limits, channel, self.has_outputs, *report, stages, self._draft_model)

    def _plan_channel(self, stages: int) -> PlanChannel:
        from oslo_models.deploy.running_batch import plan_channel

        setup, mesh = self._setup, self.model.mesh
        if setup.world_size == 1:
            return plan_channel.NoFollowers()
        if setup.directory is None:
            return plan_channel.BroadcastChannel(mesh.model, mesh.model.ranks.index(self._leader))
        path, size = Path(setup.directory) / "running-batch", setup.limits.step_bytes
        return plan_channel.SharedMemoryChannel(path, setup.rank, self._leader, setup.world_size, size, stages)

    def _count_token(self) -> None:
        self.progress += 1

    def _progress_hook(self, bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the progress bars of transformers, because the application shows its own."""
        if not args or not isinstance(args[0], Sized):
            return bar(*args, **kwargs)
        return self._with_progress(args[0])

    def _with_progress(self, items: Any) -> Iterator[Any]:
        reported_at = 0.0
        for number, item in enumerate(items, 1):
            yield item
            if number == len(items) or time.monotonic() > reported_at + 0.1:
                reported_at = time.monotonic()
                self._send(Loading(number, len(items)), 0)

    def call(self, request: Request) -> Any:
        """Run a call. Exceptions of the model propagate."""
        _seed(request.seed, self.device, only_torch=request.method == "forward")
        if request.generation_config is not None:
            self.model.generation_config = request.generation_config
        if self.model.pipeline is not None:  # forget that an earlier call was abandoned
            self.model.pipeline.runner.abandoned = False
        self._forget_prefixes_before(request.method)
        kwargs = dict(request.kwargs)
        if request.method == "memory":
            return self._memory(*request.args)
        if request.method == "reserve_batch":
            device = str(self.device) if self.device.type == "cuda" else f"cpu:{self.rank}"
            return device, self.batch.reserve()
        if request.method == "batch_graphs":
            return self.rank, self.batch.describe_graphs()
        if request.method == "generate":
            return self._generate(request, kwargs)
        if request.method == "forward":
            return self._forward(request.args, kwargs)
        if request.method in _OF_THE_RANK:
            return _OF_THE_RANK[request.method](self.model, *request.args)
        result = getattr(self.model, request.method)(*_to_device(request.args, self.device), **kwargs)
        return None if result is self.model else result

    def _forget_prefixes_before(self, method: str) -> None:
        if "batch" not in vars(self):  # not used yet
            return
        from oslo_models.deploy.running_batch.loop import UNCHANGING

        if method not in UNCHANGING:
            self.batch.forget_prefixes()

    def _generate(self, request: Request, kwargs: dict[str, Any]) -> Any:
        from transformers import StoppingCriteriaList

        criteria = [*(kwargs.pop("stopping_criteria", None) or []), self._cancellation_criterion(request.number)]
        if request.stream:  # on every rank, so that transformers takes the same path on all ranks
            send = partial(self._stream, request.number) if self.has_outputs else lambda value: None
            kwargs["streamer"] = _ForwardingStreamer(send)
        if (decoding := kwargs.pop("decoding", None)) is not None:
            kwargs["custom_generate"] = decoding.method(kwargs.get("streamer"))
        kwargs = _to_device(kwargs, self.device)
        args, names = _to_device(request.args, self.device), kwargs.pop("adapter_names", None)
        with self._adapter.of_call(kwargs, names):
            return self.model.generate(*args, **kwargs, stopping_criteria=StoppingCriteriaList(criteria))

    def _stream(self, number: int, value: Any) -> None:
        self._send(Streamed(number, value), number)

    def _cancellation_criterion(self, number: int) -> Callable[..., Tensor]:
        """Return a criterion that stops `generate` after a cancellation, at the same token on all ranks.

        Whisper goes on with the next window of a sound after it has been stopped; then the criterion raises on all
        ranks. Between two tokens, it lets the running batch compute a step.
        """
        import torch

        from oslo_models.deploy.cancellation import CallCancelled
        from oslo_models.distributed.collectives import all_reduce

        ended = False

        def is_cancelled(input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            nonlocal ended
            if ended:
                raise CallCancelled("the call was cancelled, and its method of decoding goes on")
            self.progress += 1
            batch: RunningBatch | None = vars(self).get("batch")
            flags = [number in self._cancelled, batch is not None and batch.wants_turn()]
            # all-reduced, because the message may reach one rank a token earlier than the others
            ends, turn = all_reduce(self.model.mesh.model, torch.tensor(flags, dtype=torch.float32)).tolist()
            if turn:
                assert batch is not None
                with self._adapter.paused():
                    batch.take_turn()
            ended = bool(ends)
            return torch.full((len(input_ids),), bool(ends), device=input_ids.device)

        is_cancelled.is_agreed = True  # type: ignore[attr-defined]
        return is_cancelled

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = (_to_device(given, self.device) for given in (args, kwargs))
        if not self.model.is_pipeline_parallelized():
            with self._adapter.of_call(kwargs):
                return self.model(*args, **kwargs)
        from torch import Tensor

        rows = [len(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim()]
        self.model.set_micro_batch_size(rows[0] if rows else 1)
        (output,) = self.model(*args, **kwargs)
        return output

    def _memory(self, kind: str) -> tuple[str, Any]:
        """Return the device of this rank and its memory, in bytes; for ``"summary"``, a text."""
        import torch

        if self.device.type == "cuda":
            measure = {"allocated": torch.cuda.memory_allocated, "reserved": torch.cuda.memory_reserved}
            return str(self.device), measure.get(kind, torch.cuda.memory_summary)(self.device)
        status = Path("/proc/self/status").read_text()
        resident = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
        return f"cpu:{self.rank}", status if kind == "summary" else resident


def _start_process_group(setup: Setup, send: Send, join: Callable[[], Join]) -> Any:
    """Start the process group. Ranks on one host meet in a private directory, other ranks at the store of rank 0.

    Returns:
        The store.
    """
    import torch
    import torch.distributed as dist

    store = _store_of_rank_0(setup, send, join) if setup.directory is None else _store_in_directory(setup.directory)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=setup.rank, world_size=setup.world_size)
    return store


def _store_in_directory(directory: str) -> Any:
    from oslo_models.distributed.directory_store import DirectoryStore

    return DirectoryStore(directory)


def _store_of_rank_0(setup: Setup, send: Send, join: Callable[[], Join]) -> Any:
    """Open the store of rank 0. The application passes its port on. Anybody who reaches the port can write to it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if setup.rank == 0:
        listener = socket.create_server(
            (setup.host, setup.port)
        )  # the store's own socket would listen on all interfaces
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        store = TCPStore(setup.host, port, setup.world_size, is_master=True, **options)
        send(Listening(port), 0)
        return store
    return TCPStore(setup.host, join().port, setup.world_size, is_master=False)


def _seed(seed: int, device: Any, only_torch: bool) -> None:
    """Seed as transformers' ``set_seed``, except unused devices: they would take as long as a call of a small model."""
    import torch

    if not only_torch:
        import numpy

        random.seed(seed)
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _adapters(model: TransformersModel, method: str, args: tuple[Any, ...]) -> Any:
    from oslo_models.deploy.adapters import call_adapters

    return call_adapters(model, method, args)


def _reason_against_adapter_names(model: Any) -> str | None:
    reason: str | None = model.row_adapters().reason
    return reason


def _get_dtype(model: TransformersModel) -> Any:
    return model.dtype


_OF_THE_RANK: dict[str, Callable[..., Any]] = {
    "held_tensors": held_tensors,
    "held_part": held_part,
    "get_dtype": _get_dtype,
    "adapters": _adapters,
    "reason_against_adapter_names": _reason_against_adapter_names,
}
"""Requests for one rank's part of the model."""


class _ForwardingStreamer:
    """A streamer that forwards its values, and ``None`` at the end. Every rank has one, and none runs user code."""

    is_agreed = True

    def __init__(self, send: Callable[[Any], Any]) -> None:
        self._send = send

    def put(self, value: Any) -> None:
        self._send(value)

    def end(self) -> None:
        self._send(None)


def _to_device(values: Any, device: Any) -> Any:
    if device.type == "cpu":  # tensors of messages are on the CPU
        return values
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
