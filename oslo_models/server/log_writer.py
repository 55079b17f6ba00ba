"""Writes the log in a separate thread, so that a blocked pipe or a full disk cannot stop the server or its workers."""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oslo_models.deploy.worker_output import workers_write_to

MOST_LINES = 4096
"""Limit of lines in the queue. Further lines are dropped."""
MOST_BYTES = 4096
"""Limit of bytes that are read from workers at once. They take one place in the queue, so that it holds long bursts."""
LAST_SECONDS = 1.0
"""Time limit for writing the queued lines at the end."""


class LogWriter(io.TextIOBase):
    """A text stream to a file descriptor that drops lines instead of waiting.

    Args:
        descriptor: the file descriptor.
        dropped: called for each dropped line.
    """

    encoding = "utf-8"

    def __init__(self, descriptor: int, dropped: Callable[[], object]) -> None:
        self._descriptor, self._dropped = descriptor, dropped
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_LINES)
        self._thread = threading.Thread(target=self._write_lines, daemon=True, name="oslo-log")
        self._thread.start()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            for _ in range(text.count("\n") or 1):
                self._dropped()
        return len(text)

    def flush(self) -> None:
        """Do nothing, so that the caller does not wait."""

    def fileno(self) -> int:
        return self._descriptor

    def finish(self) -> None:
        """Wait a short time for the queued lines."""
        try:
            self._lines.put(None, timeout=LAST_SECONDS)
        except queue.Full:
            return
        self._thread.join(LAST_SECONDS)

    def _write_lines(self) -> None:
        while (text := self._lines.get()) is not None:
            data = text.encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                self._dropped()


def _copy_lines(reading: int, writer: LogWriter) -> None:
    """Copy from a pipe to the log, in whole lines if they are not too long."""
    begun = b""
    while data := os.read(reading, MOST_BYTES):
        lines, newline, begun = (begun + data).rpartition(b"\n")
        if len(begun) >= MOST_BYTES:
            lines, begun = lines + newline + begun, b""
        else:
            lines += newline
        if lines:
            writer.write(lines.decode("utf-8", "backslashreplace"))
    if begun:
        writer.write(begun.decode("utf-8", "backslashreplace"))
    os.close(reading)


@contextmanager
def log_to_stderr(dropped: Callable[[], object], *loggers: logging.Logger) -> Iterator[None]:
    """Send the logs of these loggers and Python's ``sys.stderr`` to descriptor 2 through one `LogWriter`.

    Workers that this process starts in the context write to a pipe, which a thread copies to the log.
    """
    before = sys.stderr
    writer = LogWriter(2, dropped)
    reading, writing = os.pipe()
    copying = threading.Thread(target=_copy_lines, args=(reading, writer), daemon=True, name="oslo-worker-log")
    copying.start()
    handler = logging.StreamHandler(writer)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    sys.stderr = writer
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        with workers_write_to(writing):
            yield
    finally:
        os.close(writing)
        copying.join(LAST_SECONDS)  # a worker that has not ended keeps the pipe open
        sys.stderr = before
        for logger in loggers:
            logger.removeHandler(handler)
        writer.finish()
