"""A key-value store for ranks on one host: files in a directory that only this user can enter.

torch's `TCPStore` listens on a port, where any user of the host can read and write. torch's `FileStore` would do, but
its file grows with every change, and the watchdog makes one each second.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

TIMEOUT = 300.0
"""Seconds that `get` waits for a key, as torch's stores do by default."""
_PAUSE = 0.002
"""Seconds between two looks for a key that is waited for."""


class DirectoryStore(Store):
    """One file for each key, replaced as a whole. Threads may share it, so it needs no clones (torch cannot make any).

    Keep a reference to it as long as a process group uses it: torch keeps only its own part of the object.

    Args:
        directory: exists, belongs to this user, and nobody else may enter it.

    Raises:
        PermissionError: others may, or it is somebody else's.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        self._directory = Path(directory)
        found = self._directory.stat()
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{directory} is not private to user {os.geteuid()}: its mode has to be 0700")

    def _file(self, key: str) -> Path:
        return self._directory / f"key-{hashlib.sha256(key.encode()).hexdigest()}"

    def set(self, key: str, value: str | bytes) -> None:
        made = self._directory / f"new-{os.getpid()}-{threading.get_ident()}"
        made.write_bytes(value.encode() if isinstance(value, str) else value)
        made.rename(self._file(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._file(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = TIMEOUT if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise DistStoreError(f"the keys {list(keys)} did not come within {seconds:g} s")
            if not self._directory.exists():
                raise DistStoreError("the store of the process group was removed: the application has ended")
            time.sleep(_PAUSE)

    def add(self, key: str, amount: int) -> int:
        with (self._directory / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            file = self._file(key)
            value = amount + (int(file.read_bytes()) if file.exists() else 0)
            self.set(key, str(value))
            return value

    def delete_key(self, key: str) -> bool:
        exists = self.check([key])
        self._file(key).unlink(missing_ok=True)
        return exists

    def num_keys(self) -> int:
        return sum(1 for _ in self._directory.glob("key-*"))
