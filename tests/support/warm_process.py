"""The process that the server of `support.warm` forks: it runs a Python program like a new interpreter."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import gc
import importlib
import logging
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from transformers.utils import logging as transformers

from oslo_models.deploy.process_copy import leave_files

from support import ROOT
from support.warm import LENGTH, Order, WarmServer, receive, warm_interpreters

MODULES = (
    "torch.distributed.launcher.api",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "oslo_models.deploy.running_batch.loop",
    "oslo_models.models.gpt2",
)
"""Modules that most test programs import; in a full test run, test modules have imported them already."""
MOST_FILES = 16
FIRST_FREE = 500
"""First temporary descriptor number for the files of an order, before they get their final numbers."""


def start_warm_server(environment: dict[str, str], modules: Sequence[str] = MODULES) -> WarmServer:
    """Start a copy of this process as a server, which ends with this process.

    Args:
        environment: environment variables during the import of the modules.
        modules: that the server imports, as far as this process has not.
    """
    ours, theirs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: the thread of pytest-xdist only waits
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _be_server(theirs, modules)
        except BaseException:  # noqa: BLE001  the client raises it
            reason = traceback.format_exc().encode()
            with suppress(OSError):
                theirs.sendall(LENGTH.pack(-len(reason)) + reason)
        os._exit(1)
    theirs.close()
    return WarmServer(ours, environment)


def _be_server(connection: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Fork a process for each order until the other end is closed."""
    leave_files({connection.fileno()})
    gc.disable()
    for name in modules:
        with suppress(ImportError):  # an older transformers lacks some architectures; programs report missing ones
            importlib.import_module(name)
    gc.freeze()
    while head := socket.recv_fds(connection, LENGTH.size, MOST_FILES):
        data, files, _, _ = head
        if not data:
            break
        body = receive(connection, LENGTH.unpack(data)[0])
        connection.sendall(LENGTH.pack(_fork(Order(*pickle.loads(body)), files, connection)))
        for file in files:
            os.close(file)
    os._exit(0)


def _fork(order: Order, files: list[int], connection: socket.socket) -> int:
    """Fork twice; return the id of the grandchild after its parent has ended."""
    reading, writing = os.pipe()
    if (between := os.fork()) == 0:
        first_parent = os.getpid()
        if (pid := os.fork()) == 0:
            os.close(reading), os.close(writing), connection.close()
            while os.getppid() == first_parent:
                time.sleep(0.001)
            _become(order, files)
        os.write(writing, LENGTH.pack(pid))
        os._exit(0)
    os.waitpid(between, 0)
    pid = LENGTH.unpack(os.read(reading, LENGTH.size))[0]
    os.close(reading), os.close(writing)
    return pid


def _become(order: Order, files: list[int]) -> NoReturn:
    code = 1
    try:
        if order.new_session:
            os.setsid()
        _take_files(files, order.descriptors)
        os.chdir(order.folder)
        inherited = dict(os.environ)
        os.environ.clear()
        os.environ.update(order.environment)
        unbuffered, arguments = order.arguments[0] == "-u", order.arguments
        _open_streams(unbuffered or "PYTHONUNBUFFERED" in os.environ)
        _forget_tests(os.environ.get("PYTHONPATH", ""))
        transformers.set_verbosity(transformers._get_default_logging_level())
        own = warm_interpreters(start_warm_server(inherited), True) if order.has_server else nullcontext()
        gc.enable()
        with own:
            code = _run(arguments[1:] if unbuffered else arguments)
    except BaseException:  # noqa: BLE001  as at the end of a new process
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(arguments: list[str]) -> int:
    """Run the program and its exit handlers; return the exit code."""
    code = 0
    try:
        _run_main(arguments)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException as error:  # noqa: BLE001
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream may be closed
            stream.flush()
    return code & 0xFF


def _run_main(arguments: list[str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    safe, arguments = arguments[0] == "-P", [each for n, each in enumerate(arguments) if n or each != "-P"]
    first, *rest = arguments
    if first == "-m":
        sys.argv, name = ["-m", *rest[1:]], rest[0]
        if not safe:
            sys.path.insert(0, os.getcwd())
        package = hasattr(sys.modules.get(name), "__path__")
        sys.modules.pop(f"{name}.__main__" if package else name, None)  # the module runs for the first time
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif first in ("-c", "-"):
        code, name = (rest.pop(0), "<string>") if first == "-c" else (sys.stdin.read(), "<stdin>")
        sys.argv = [first, *rest]
        sys.path.insert(0, "")
        exec(compile(code, name, "exec"), main.__dict__)
    else:
        sys.argv, main.__file__ = arguments, os.path.abspath(first)
        sys.path.insert(0, str(Path(first).resolve().parent))
        exec(compile(Path(first).read_bytes(), main.__file__, "exec"), main.__dict__)


# Removing traces of the tests -----------------------------------------------------------------------------------------


def _take_files(files: list[int], numbers: list[int]) -> None:
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for file in files]
    leave_files(set(moved))
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
        os.close(file)


def _forget_tests(python_path: str) -> None:
    """Reset the interpreter to the state of a new one, except for imported libraries."""
    import numpy
    import torch

    torch.seed()
    numpy.random.seed()
    own = tuple(str(ROOT / name) for name in ("tests", "benchmarks"))
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(own):
            del sys.modules[name]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [*filter(None, python_path.split(os.pathsep)), *installed]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    faulthandler.disable()
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)
    multiprocessing.util._finalizer_registry.clear()
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]


def _open_streams(unbuffered: bool) -> None:
    """Create new ``sys.stdin``, ``stdout`` and ``stderr``, and redirect handlers of loggers to them."""
    raw = [FileIO(number, "wb" if number else "rb", closefd=False) for number in (0, 1, 2)]
    out, err = raw[1:] if unbuffered else map(BufferedWriter, raw[1:])
    options: dict[str, Any] = {"errors": "backslashreplace", "line_buffering": True, "write_through": unbuffered}
    sys.stdin = sys.__stdin__ = TextIOWrapper(BufferedReader(raw[0]))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = TextIOWrapper(out, write_through=unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = TextIOWrapper(err, **options)  # type: ignore[misc]
    logging.getLogger().handlers.clear()
    for handler in [reference() for reference in logging._handlerList]:  # type: ignore[attr-defined]
        if type(handler) is logging.StreamHandler:
            handler.stream = sys.stderr
            vars(handler).pop("flush", None)  # transformers' flush belongs to the former stream
