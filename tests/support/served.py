"""``oslo-models serve`` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import ROOT
from support.http_server import connect, read_answer
from support.waiting import wait_until

PATH = "/v1/completions"


def get(url: str, *headers: str, host: str = "elsewhere.example") -> tuple[int, dict[str, str], bytes]:
    address, _, path = url.removeprefix("http://").partition("/")
    lines = [f"GET /{path} HTTP/1.1", f"Host: {host}", *headers]
    with connect(f"http://{address}", "\r\n".join(lines).encode() + b"\r\n\r\n") as connected:
        return read_answer(connected)


def workers_of(application: int) -> list[int]:
    """Return the process ids of the workers: the descendants of the application without children."""
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = {}
    for line in listed.stdout.splitlines():
        parent, pid = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    below, workers = [*children.get(application, [])], list[int]()
    for pid in below:
        below += children.get(pid, [])
        workers += [] if pid in children else [pid]
    return workers


class Running:
    """A process of ``oslo-models serve``, and its output.

    Args:
        stderr: where its log goes, if not to the output.
        open_files: its limit of open files.
    """

    def __init__(
        self, folder: Path, *options: object, stderr: int = subprocess.STDOUT, open_files: int | None = None
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
        command = [sys.executable, "-m", "oslo_models", "serve", folder, "--port", 0, *options]
        if open_files is not None:
            command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
        self.process = subprocess.Popen([str(each) for each in command], env=environment, **pipes)
        self.lines = list[str]()
        threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()

    def says(self, text: str, seconds: float = 300.0) -> str:
        """Wait for a line with this text, and return it."""
        wait_until(lambda: self.process.poll() is not None or any(text in line for line in list(self.lines)), seconds)
        seen: list[str] = []
        for line in self.lines:
            seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"the program ended without saying {text!r}:\n{''.join(seen)}")

    @property
    def workers(self) -> list[int]:
        return workers_of(self.process.pid)


@contextmanager
def serving(folder: Path, *options: object, **process: Any) -> Iterator[Running]:
    running = Running(folder, *options, **process)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
