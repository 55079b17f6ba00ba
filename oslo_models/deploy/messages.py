"""The messages between the application and its workers; `serialization` turns them into bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oslo_models.deploy.running_batch.limits import BatchLimits


class Setup(NamedTuple):
    """To a worker, first: its rank and what to load.

    Attributes:
        threads: of torch.
        path: the ``sys.path`` of the application.
        make: constructs the model: ``(class, name of its constructor, arguments, keyword arguments)``, pickled
            separately, so that a class that cannot be imported is reported like any other failure of loading.
        host: the address at which the other ranks reach rank 0, if they do not meet in a directory.
        port: the port at which rank 0 listens; 0: a free one.
        directory: where the ranks find each other if they are on one host; private to this user.
        salt: random; with the secret of the deployment, if there is one, it makes the key by which ranks know that
            objects come from each other.
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
        seed: for all random generators, set before the call.
        stream: send the tokens as they are generated.
        gather: every rank returns its result.
        generation_config: replaces that of the model, if the application has changed its own.
        joins: it is a call of `generate` that is computed in the running batch.
    """

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    seed: int
    stream: bool = False
    gather: bool = False
    generation_config: Any = None
    joins: bool = False


class Cancel(NamedTuple):
    """To every worker: end a call of `generate` at the next token."""

    number: int


class Ping(NamedTuple):
    """To a worker, which answers with `Pong` at any time, also during a call."""


class Listening(NamedTuple):
    """From rank 0: the port of its store."""

    port: int


class Loading(NamedTuple):
    """From a worker: how many of its weights it has read."""

    done: int
    total: int


class Ready(NamedTuple):
    """From a worker: the model is loaded."""

    device: str


class Streamed(NamedTuple):
    """From the rank that has the outputs: a value that `generate` gave to its streamer; ``None`` at the end."""

    number: int
    value: Any


class Stepped(NamedTuple):
    """From the leader of the running batch, once a step: what the streamers of its calls get.

    Attributes:
        values: pairs of the number of a call and a token, a `Scored`, a prompt (a list of lists) or ``None``: the end.
    """

    values: list[tuple[int, Any]]


class Reused(NamedTuple):
    """From the leader of the running batch: so many tokens of a prompt were not computed, as a prefix had them."""

    tokens: int


class Reply(NamedTuple):
    """From a worker: a call has returned. ``result`` is set by the rank that has the outputs, or with ``gather``."""

    number: int
    result: Any = None


class Failure(NamedTuple):
    """From a worker: a call, or loading (number -1), has raised.

    Attributes:
        text: the traceback.
        secondary: a consequence of the failure of another rank.
    """

    number: int
    error: BaseException
    text: str
    secondary: bool = False


class Pong(NamedTuple):
    """From a worker: it is alive.

    Attributes:
        busy: seconds since its current call began; ``None`` when it is idle.
        progress: how many tokens it has generated since it was started.
    """

    busy: float | None = None
    progress: int = 0
