"""The messages between the application and its workers; `serialization` turns them into bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oslo_models.deploy.running_batch.limits import BatchLimits


class Setup(NamedTuple):
    """To a worker, first: its rank and the model to load.

    Attributes:
        threads: number of torch threads.
        path: the ``sys.path`` of the application.
        make: constructs the model: ``(class, name of its constructor, arguments, keyword arguments)``. It is pickled
            separately, so that a failed import of the class is reported like any other loading failure.
        host: the address at which the other ranks reach rank 0, if they do not meet in a directory.
        port: the port at which rank 0 listens; 0 for a free port.
        directory: the directory in which ranks on one host find each other. It is private to this user.
        salt: random bytes. The salt and the secret of the deployment, if there is one, form the key with which ranks
            authenticate objects from each other.
        limits: of the running batch.
    """

    rank: int
    world_size: int
    threads: int
    path: list[str]
    make: bytes
    host: str
    port: int
    directory: str | None
    salt: bytes
    limits: BatchLimits


class Join(NamedTuple):
    """To the other workers, once rank 0 listens: the port of its store."""

    port: int


class Request(NamedTuple):
    """To every worker: call a method of the model.

    Attributes:
        seed: for all random generators, set before the call; of a call that joins, also the state of its generator.
        stream: send the tokens as they are generated.
        gather: every rank returns its result.
        generation_config: replaces the model's generation configuration, if the application has changed it.
        joins: compute this call of `generate` in the running batch.
        gives_way: run steps of the running batch between the tokens of this call of `generate`.
        images: of each row of a call that joins; see `PromptImages` and `PromptSound`. Plain tuples, whose tensors are
            sent as bytes.
        tenant: a call reuses prefixes of calls with the same number only.
        goes_on: another call that joins goes on with the random numbers of this one. The result has a second value, the
            state of the generator of its first row; ``None`` without a generator.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: Any
    stream: bool = False
    gather: bool = False
    generation_config: Any = None
    joins: bool = False
    gives_way: bool = False
    images: tuple[tuple[Any, ...], ...] = ()
    tenant: int = 0
    goes_on: bool = False


class Cancel(NamedTuple):
    """To every worker: end a call of `generate` at the next token."""

    number: int


class Ping(NamedTuple):
    """To a worker. It answers with `Pong` at any time, even during a call."""


class Listening(NamedTuple):
    """From rank 0: the port of its store."""

    port: int


class Loading(NamedTuple):
    """From a worker: the number of weights read so far."""

    done: int
    total: int


class Ready(NamedTuple):
    """From a worker: the model is loaded."""

    device: str


class Streamed(NamedTuple):
    """From the rank with the outputs: a value that `generate` gave to its streamer; ``None`` at the end."""

    number: int
    value: Any


class Stepped(NamedTuple):
    """From the leader of the running batch, once per step: values for the streamers of its calls.

    Attributes:
        values: pairs of call number and value. A value is a token, a `Scored`, a prompt (a list of lists), or ``None``
            at the end.
    """

    values: list[tuple[int, Any]]


class Reused(NamedTuple):
    """From the leader of the running batch: the number of prompt tokens that a cached prefix covered."""

    tokens: int


class Speculated(NamedTuple):
    """From the leader of the running batch, for a step with drafted tokens: their number, and the accepted ones."""

    drafted: int
    accepted: int


class Reply(NamedTuple):
    """From a worker: a call has returned. The rank with the outputs sets ``result``; with ``gather``, all ranks do."""

    number: int
    result: Any = None


class Failure(NamedTuple):
    """From a worker: a call, or loading (number -1), has raised.

    Attributes:
        text: the traceback.
        secondary: the failure of another rank caused this one.
    """

    number: int
    error: BaseException
    text: str
    secondary: bool = False


class Pong(NamedTuple):
    """From a worker: it is alive.

    Attributes:
        busy: seconds since its current call began; ``None`` when it is idle.
        progress: the number of tokens generated since its start.
    """

    busy: float | None = None
    progress: int = 0
