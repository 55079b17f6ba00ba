"""Makes the fork server a copy of the application, where that is as good as a process that imports everything anew.

An application that only imports the library and deploys a model is: it has one thread, no GPU and nothing in memory but
modules. So its workers start at once instead of after the seconds that torch and transformers take to import.
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
"""Of memory that is not of files: a copy would keep it from being freed for as long as the application runs."""


class ProcessCopy:
    """The copy as seen from the application; the part of ``subprocess.Popen`` that `ForkServer` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        with suppress(ChildProcessError):  # the application waits for all of its children
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None


def copy_this_process(control: socket.socket, modules: Iterable[str]) -> ProcessCopy | None:
    """Fork a fork server off this process.

    Args:
        control: its end of the connection.
        modules: what it imports, as far as the application has not.

    Returns:
        ``None`` where a worker that it forks could behave otherwise than a new process.
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
    if len(os.listdir("/proc/self/task")) > 1:  # threads of libraries, which may hold locks in the copy
        copy.kill()
        copy.wait()
        return None
    return copy


def _is_like_new() -> bool:
    """Whether this process has imported torch and done nothing else that would be noticed in a copy."""
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
    """Close what the original of this process has open, so that others see the end of its connections.

    The descriptors are not freed: objects of the original that still name them would otherwise write to whatever a
    process opens next.

    Args:
        kept: descriptors that stay open.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # that of the directory itself is closed already
                os.fstat(int(name))
                os.dup2(nothing, int(name), inheritable=False)


def _reset_random_numbers() -> None:
    import torch

    torch.default_generator.manual_seed(torch.Generator().initial_seed())
