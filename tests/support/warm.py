"""Forks the Python processes of tests from a process that has imported torch and transformers, to save 4 s each.

The `WarmServer` is a copy of the test process from before its first test. Where `warm_interpreters` patches
``subprocess``, the server forks a child of the caller instead of starting this interpreter. The child has the
arguments, environment, folder and files of the call (see `support.warm_process`). Tests may not depend on how an
interpreter starts, on its imported modules, or on its shutdown. A new process starts where a copy would differ from it.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

LENGTH = struct.Struct("q")
AT_IMPORT = ("HF_", "KMP_", "MKL_", "PYTHON", "PYTORCH_", "TORCHINDUCTOR_", "TRANSFORMERS_", "TRITON_")
"""Name prefixes of variables that modules or the interpreter may read before the copy is made."""
NOT_AT_IMPORT = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "TRANSFORMERS_VERBOSITY"),  # copies apply these
    # read on demand
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    "HF_HOME",  # nothing is written to it without a network
)
PR_SET_CHILD_SUBREAPER = 36


class Order(NamedTuple):
    """Command line of a process, ``python [-u] SCRIPT | - | -m MODULE | -c CODE``, and its inherited state."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    """File descriptor numbers of the process for the files sent with the order."""
    new_session: bool
    has_server: bool
    """Whether the process starts its children as copies of itself too, made before it runs anything."""


class WarmServer:
    """The client's side of a server.

    Args:
        connection: socket of the server.
        environment: environment variables during the import of its modules.
    """

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection, self._environment, self._lock = connection, dict(environment), threading.Lock()

    def start(self, order: Order, files: Sequence[int]) -> int:
        """Start a child of this process; return its id.

        Raises:
            RuntimeError: The server raised an exception.
            EOFError: The server was killed.
        """
        body = pickle.dumps(tuple(order))  # the server cannot import its class after removing test modules
        with self._lock, _adopting():
            with suppress(ConnectionError):  # the server has ended, and its last answer gives the reason
                socket.send_fds(self._connection, [LENGTH.pack(len(body))], files)
                self._connection.sendall(body)
            answer = LENGTH.unpack(receive(self._connection, LENGTH.size))[0]
            if answer < 0:
                reason = receive(self._connection, -answer).decode()
                raise RuntimeError(f"the server of warm processes has ended:\n{reason}")
            return int(answer)

    def order(self, call: Mapping[str, Any], nested: bool) -> tuple[Order, list[int]] | None:
        """Return the order for a call of ``Popen`` and its files; ``None`` if the call needs a new process."""
        environment = dict(os.environ if call["env"] is None else call["env"])
        is_command = isinstance(call["args"], (list, tuple)) and not call["shell"]
        arguments = _arguments([os.fspath(each) for each in call["args"]], environment) if is_command else []
        changes = [call.get(name) for name in ("executable", "preexec_fn", "gid", "gids", "uid")]
        group = call.get("process_group", -1)
        if not arguments or any(changes) or group not in (-1, None) or call["umask"] >= 0:
            return None
        if self._at_import(environment) != self._at_import(self._environment):
            return None
        kept = list(call["pass_fds"])
        ends = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        files = [number if end == -1 else end for number, end in enumerate(ends)]
        folder = os.path.abspath(call["cwd"] or ".")
        numbers = [0, 1, 2, *kept]
        return Order(arguments, environment, folder, numbers, call["start_new_session"], nested), [*files, *kept]

    @staticmethod
    def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
        names = (name for name in environment if name.startswith(AT_IMPORT) and name not in NOT_AT_IMPORT)
        return {name: environment[name] for name in names}


def receive(connection: socket.socket, length: int) -> bytes:
    """Receive exactly ``length`` bytes."""
    data = b""
    while len(data) < length:
        try:
            more = connection.recv(length - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            raise EOFError("the other end of the connection of warm processes has ended without a word")
        data += more
    return data


@contextmanager
def _adopting() -> Iterator[None]:
    """Within the block, this process adopts descendants when their parents end."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _arguments(command: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the arguments of this interpreter; empty for other commands and for interpreter options."""
    if command[0] != sys.executable:
        found = shutil.which(command[0], path=environment.get("PATH"))
        if found is None or not _is_script(Path(found)):
            return []
        command = [sys.executable, found, *command[1:]]
    rest = [each for number, each in enumerate(command[1:]) if number or each not in ("-u", "-P")]
    known = rest and (rest[0] in ("-", "-m", "-c") or not rest[0].startswith("-"))
    return command[1:] if known else []


def _is_script(path: Path) -> bool:
    """Whether the first line of the file names this interpreter."""
    with path.open("rb") as file:
        return file.readline().decode(errors="replace").strip() == f"#!{sys.executable}"


@contextmanager
def warm_interpreters(server: WarmServer, nested: bool) -> Iterator[None]:
    """Within the block, ``subprocess`` lets the server start processes of this interpreter.

    Args:
        server: the server of this process.
        nested: whether these processes start their children as copies too.
    """
    original: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(original)

    def execute_child(self: Any, *args: Any) -> None:
        call = signature.bind(self, *args).arguments
        if (made := server.order(call, nested)) is None:
            original(self, *args)
            return
        self.pid, self._child_created = server.start(*made), True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in ends))

    with mock.patch.object(subprocess.Popen, "_execute_child", execute_child):
        yield
