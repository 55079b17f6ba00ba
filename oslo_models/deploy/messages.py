"""What the application and its workers say to each other: pickled messages, one for each line of a conversation."""

from __future__ import annotations

import ctypes
import functools
import importlib
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_HEAD = struct.Struct("<qq")  # the number of a call, and the length of what is pickled


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
    """A message as bytes: the number of the call that it is about, its fields without tensors, and what those hold.

    Pickle looks up every class that it meets, and torch's way to pickle a tensor takes as long as a small model and
    sends all that a view views: so they get only what is inside of objects of other kinds.
    """
    held: list[bytes] = []
    fields, parts = _apart(tuple(message), held)
    head = pickle.dumps((type(message).__name__, fields, parts), pickle.HIGHEST_PROTOCOL)
    return b"".join((_HEAD.pack(number, len(head)), head, *held))


def decode(data: bytes) -> Any:
    """The message; if it cannot be read here, a `Failure` of the call that it is about."""
    try:
        return _read(data)
    except Exception as error:  # noqa: BLE001  unpickling may raise anything, such as when a class cannot be imported
        return Failure(_HEAD.unpack_from(data)[0], portable(error), "".join(traceback.format_exception(error)))


def _read(data: bytes) -> Any:
    _, size = _HEAD.unpack_from(data)
    rest = memoryview(data)[_HEAD.size :]
    kind, fields, parts = pickle.loads(rest[:size])
    return _KINDS[kind]._make(_whole(fields, parts, rest[size:]))


def rehearse() -> None:
    """Write and read a message for nothing: what that takes is then at hand for the next one.

    After two milliseconds in which a core did something else, or nothing, torch takes fifteen times as long to convert
    a tensor as it does the second time.
    """
    _read(encode(_example()))  # what the handler of a signal raises meanwhile is not for `decode` to catch


@functools.cache
def _example() -> Reply:
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    return Reply(0, SentOutput(BaseModelOutput(torch.zeros(1))))


def _apart(value: Any, held: list[bytes]) -> tuple[Any, Any]:
    """A value without its tensors and outputs, and what these are.

    Args:
        held: gets what each tensor holds.

    Returns:
        The value, with ``None`` for a tensor and a dictionary for an output. Then, for these, what makes them again
        and its arguments; for a container, by key or index, what is so said of its items; ``None`` for all else.
    """
    kind = type(value)
    items: Iterable[tuple[Any, Any]]
    if kind is dict:
        items = value.items()
    elif kind is tuple or kind is list:
        items = enumerate(value)
    elif kind is SentOutput:
        cls = type(value.output)
        fields = {key: item for key, item in value.output.items() if key != "past_key_values"}
        rest, parts = _apart(fields, held)
        return rest, ("output", parts, cls.__module__, cls.__qualname__)
    elif kind.__name__ == "Tensor" and kind.__module__ == "torch" and (parts := _of_tensor(value, held)):
        return None, parts
    else:
        return value, None
    rest, parts = {}, {}
    for key, item in items:
        rest[key], of_item = _apart(item, held)
        if of_item:
            parts[key] = of_item
    return rest if kind is dict else kind(rest.values()), parts or None


def _whole(value: Any, parts: Any, held: memoryview) -> Any:
    """The value that `_apart` took apart."""
    if parts is None:
        return value
    if type(parts) is tuple:
        return _MADE_OF[parts[0]](value, held, *parts[1:])
    kind = type(value)
    items = value if kind is dict else dict(enumerate(value))
    for key, of_item in parts.items():
        items[key] = _whole(items[key], of_item, held)
    return items if kind is dict else kind(items.values())


def _of_tensor(value: Any, held: list[bytes]) -> tuple[Any, ...] | None:
    """What makes a tensor again, out of what is added to ``held``; ``None`` if that is better left to torch."""
    torch = sys.modules["torch"]
    name = _names().get(value.dtype)
    if name is None or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    if not (value.is_cpu and value.is_contiguous()):
        value = value.cpu().contiguous()
    start = sum(map(len, held))
    # numpy, which would have to be asked for each type whether it has it, takes nearly twice as long
    held.append(ctypes.string_at(value.data_ptr(), value.nbytes))
    return "tensor", start, start + value.nbytes, name, (*value.shape,)


def _tensor(value: None, held: memoryview, start: int, stop: int, name: str, shape: tuple[int, ...]) -> Any:
    import numpy
    import torch

    data = bytearray(held[start:stop])  # a copy, so that who keeps one tensor of a message does not keep them all
    if name in _OF_NUMPY:
        return torch.from_numpy(numpy.ndarray(shape, name, data))
    return torch.from_numpy(numpy.ndarray(len(data), "uint8", data)).view(getattr(torch, name)).view(shape)


_OF_NUMPY = {
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"),
}
_OF_TORCH = {"bfloat16", "complex32", "float8_e4m3fn", "float8_e5m2"}


@functools.cache
def _names() -> dict[Any, str]:
    """Of those types whose elements are all that a tensor has (unlike quantized ones)."""
    import torch

    return {getattr(torch, name): name for name in _OF_NUMPY | _OF_TORCH}


def _output(value: dict[str, Any], held: memoryview, parts: Any, module: str, name: str) -> Any:
    cls = _class(module, name)
    output = cls.__new__(cls)  # what is checked where it is constructed takes as long as the rest of a message
    for key, item in _whole(value, parts, held).items():
        output[key] = item
    return output


@functools.cache
def _class(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


_MADE_OF: dict[str, Callable[..., Any]] = {"tensor": _tensor, "output": _output}


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
