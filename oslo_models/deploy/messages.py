"""What the application and its workers say to each other: pickled messages, one for each line of a conversation."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_HEAD = 8


class Setup(NamedTuple):
    """To a worker, first: who it is and what to load.

    Attributes:
        path: where the application imports from.
        make: constructs the model: ``(class, name of its constructor, arguments, keyword arguments)``, pickled apart,
            so that a class that cannot be imported is reported as any other failure of loading.
        host: the address of rank 0 for the others.
    """

    rank: int
    world_size: int
    threads: int
    path: list[str]
    make: bytes
    host: str


class Join(NamedTuple):
    """To a worker, when rank 0 has said where it listens."""

    port: int


class Request(NamedTuple):
    """To every worker: call a method of the model.

    Attributes:
        seed: for all random generators, before the call.
        stream: send the tokens as they come.
        gather: every rank answers.
        generation_config: replaces that of the model, if the application has changed its own.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    stream: bool = False
    gather: bool = False
    generation_config: Any = None


class Cancel(NamedTuple):
    """To every worker: end a call of `generate` at the next token."""

    number: int


class Ping(NamedTuple):
    """To a worker, which answers at any time."""


class Listening(NamedTuple):
    """From rank 0: where the others find it."""

    port: int


class Loading(NamedTuple):
    """From a worker: how many of its weights it has read."""

    done: int
    total: int


class Ready(NamedTuple):
    """From a worker: the model is loaded."""

    device: str


class Streamed(NamedTuple):
    """From the rank that answers: what `generate` gave to its streamer; ``None`` at the end."""

    number: int
    value: Any


class Reply(NamedTuple):
    """From a worker: a call has ended; ``result`` from the rank that answers only."""

    number: int
    result: Any = None


class SentOutput:
    """A ``ModelOutput`` on its way: with what has a value, but for caches, which stay where they are."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Failure(NamedTuple):
    """From a worker: a call, or loading (number -1), has raised.

    Attributes:
        secondary: because another rank has.
    """

    number: int
    error: BaseException
    text: str
    secondary: bool = False


class Pong(NamedTuple):
    """From a worker.

    Attributes:
        busy: seconds since it began what it does now; ``None`` when it waits for work.
    """

    busy: float | None = None
    progress: int = 0


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Setup, Join, Request, Cancel, Ping, Listening, Loading, Ready, Streamed, Reply, Failure, Pong)
}


def encode(message: tuple[Any, ...], number: int = 0) -> bytes:
    """A message as bytes, with the number of the call that it is about in front."""
    file = io.BytesIO()
    file.write(number.to_bytes(_HEAD, "little", signed=True))
    _Pickler(file).dump((type(message).__name__, tuple(message)))  # to look its class up takes longer
    return file.getvalue()


def decode(data: bytes) -> Any:
    """The message; if it cannot be read here, a `Failure` of the call that it is about."""
    file = io.BytesIO(data)
    number = int.from_bytes(file.read(_HEAD), "little", signed=True)
    try:
        kind, fields = _Unpickler(file).load()
        return _KINDS[kind]._make(fields)
    except Exception as error:  # noqa: BLE001  unpickling may raise anything, such as when a class cannot be imported
        return Failure(number, portable(error), "".join(traceback.format_exception(error)))


class _Pickler(pickle.Pickler):
    """Sends tensors and outputs in our own way, which is several times as fast: pickle looks up every class that it
    meets, and torch's way takes as long as a small model, and sends all that a view views.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._parts = _parts() if "torch" in sys.modules else {}  # where it is not imported there are no tensors

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        parts = self._parts.get(type(value))
        return parts and parts(value)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, parts: tuple[Any, ...]) -> Any:
        kind, *rest = parts
        return _MADE_OF[kind](*rest)


@functools.cache
def _parts() -> dict[type, Callable[[Any], tuple[Any, ...] | None]]:
    """What to send for a value, by its type: the name of what makes one of it, and its arguments."""
    import torch

    def tensor(value: torch.Tensor) -> tuple[Any, ...] | None:
        try:
            array = value.numpy()
        except (TypeError, RuntimeError):  # to ask before takes longer
            pass
        else:
            return "tensor", bytearray(array.data), array.dtype.str, array.shape
        if value.requires_grad or not value.is_cpu:
            return "same", value.detach().cpu()
        if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            return None
        # numpy does not have torch's smaller types
        return "view", value.reshape(-1).view(torch.uint8), str(value.dtype).removeprefix("torch."), (*value.shape,)

    def output(value: SentOutput) -> tuple[Any, ...]:
        cls, fields = type(value.output), {key: item for key, item in value.output.items() if key != "past_key_values"}
        return "output", cls.__module__, cls.__qualname__, fields

    return {torch.Tensor: tensor, SentOutput: output}


def _tensor(data: bytearray, dtype: str, shape: tuple[int, ...]) -> Any:
    import numpy
    import torch

    return torch.from_numpy(numpy.ndarray(shape, dtype, data))


def _view(data: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return data.view(getattr(torch, dtype)).view(shape)


def _output(module: str, name: str, fields: dict[str, Any]) -> Any:
    cls = _class(module, name)
    output = cls.__new__(cls)  # what is checked where it is constructed takes as long as the rest of a message
    for key, value in fields.items():
        output[key] = value
    return output


@functools.cache
def _class(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


_MADE_OF: dict[str, Callable[..., Any]] = {
    "tensor": _tensor,
    "view": _view,
    "output": _output,
    "same": lambda value: value,
}


def portable(error: BaseException) -> BaseException:
    """The error, or one of the nearest ancestor type that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001  pickling may raise anything
        for kind in type(error).__mro__:
            with suppress(TypeError):  # some want more than a text
                if kind.__module__ == "builtins" and isinstance(same := kind(str(error)), BaseException):
                    return same
        return RuntimeError(str(error))
