"""Forks the fork server off the application, if the copy is equivalent to a new process with the same imports.

An application that only imports the library and deploys a model qualifies: it has one thread, no GPU and only modules
in memory. Its workers then start at once, without the seconds that torch and transformers take to import.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from oslo_models.deploy import fork_server

MOST_BYTES = 1 << 30
"""Limit on anonymous memory. A copy would keep it allocated for as long as the application runs."""


class ProcessCopy:
    """Handle of the copy in the application: the part of ``subprocess.Popen`` that `ForkServer` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._has_ended = False

    def send_signal(self, number: int) -> None:
        if not self._has_ended:  # another process may have its number by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # the application waits for all of its children
            return None
        finally:
            self._has_ended = True


def copy_this_process(control: socket.socket, modules: Iterable[str]) -> ProcessCopy | None:
    """Fork a fork server off this process.

    Args:
        control: the server's end of the connection.
        modules: modules to import, unless the application has imported them already.

    Returns:
        ``None`` if a forked worker could behave differently from a new process.
    """
    if not _is_like_new():
        return None
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    pid = os.fork()
    if pid == 0:
        _be_server(control, modules)
    copy = ProcessCopy(pid)
    if len(os.listdir("/proc/self/task")) > 1:  # library threads may hold locks in the copy
        copy.kill()
        copy.wait()
        return None
    return copy


def _is_like_new() -> bool:
    """Return whether this process has imported torch and has no other state that a copy would inherit."""
    if threading.active_count() > 1 or threading.current_thread() is not threading.main_thread():
        return False
    if sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__:  # loggers write to these objects
        return False
    if "transformers.modeling_utils" not in sys.modules:
        return False
    import torch
    import torch.distributed as dist

    return (
        torch.cuda.device_count() == 0  # counting may have initialised the driver, which does not survive a fork
        and not dist.is_initialized()
        and torch.get_default_dtype() == torch.float32
        and torch.get_default_device() == torch.device("cpu")
        and torch.get_float32_matmul_precision() == "highest"
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cpu")
        and _bytes_in_memory() < MOST_BYTES
    )


def _bytes_in_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _be_server(control: socket.socket, modules: Iterable[str]) -> NoReturn:
    try:
        gc.disable()
        gc.freeze()  # objects of the application are never finalised here
        sys.settrace(None)
        sys.setprofile(None)
        os.setsid()  # Ctrl-C in a terminal is for the application only
        _reset_signals()
        leave_files({1, 2, control.fileno()})
        logging.getLogger().handlers.clear()  # they write to those files
        _reset_random_numbers()
        fork_server.import_modules(control, modules)
        fork_server.serve(control)
    except BaseException:  # noqa: BLE001  the application's own handlers are not for this process
        traceback.print_exc()
    os._exit(1)


def _reset_signals() -> None:
    if signal.getsignal(signal.SIGCHLD) is not None:
        signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def leave_files(kept: Set[int]) -> None:
    """Close the files inherited from the application, so that its peers see the end of their connections.

    The descriptors stay reserved. Otherwise inherited objects that still use them would write to the next opened file.

    Args:
        kept: descriptors that stay open.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # the directory's descriptor is closed already
                os.fstat(int(name))
                os.dup2(nothing, int(name), inheritable=False)


def _reset_random_numbers() -> None:
    import torch

    torch.default_generator.manual_seed(torch.Generator().initial_seed())
