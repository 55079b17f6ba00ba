"""Short paths of folders, for Unix sockets: the path of a socket has at most 107 bytes, and ``TMPDIR`` may be long."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import process, util
from pathlib import Path

_kept = ExitStack()
"""Paths that are used to the end of the process."""


@contextmanager
def short_path(folder: str | Path) -> Iterator[str]:
    """Within the block, return a path of some 20 characters to the folder.

    It leads through a descriptor of this process, so other processes of the user can use it too.
    """
    if sys.platform != "linux":
        yield str(folder)
        return
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def shorten_socket_paths() -> None:
    """Make `multiprocessing` create the sockets of this process and its children under a short path."""
    folder, settings = util.get_temp_dir(), process.current_process()._config  # type: ignore[attr-defined]
    if not folder.startswith(f"/proc/{os.getpid()}/"):
        settings["tempdir"] = _kept.enter_context(short_path(folder))
