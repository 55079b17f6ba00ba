"""Key-value store for ranks on one host: files in a directory that only this user can access.

torch's `TCPStore` listens on a port, which any user of the host can access. The file of torch's `FileStore` grows with
every change, and the watchdog makes one change per second.
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
"""Seconds that `get` waits for a key, like torch's stores by default."""
_PAUSE = 0.002
"""Polling interval for an awaited key, in seconds."""


class DirectoryStore(Store):
    """Store with one file per key, replaced as a whole. Threads may share it, so no clones are needed.

    torch cannot clone it. Keep a reference as long as a process group uses it: torch keeps only the C++ part of the
    object.

    Args:
        directory: an existing directory of this user, inaccessible to others.

    Raises:
        PermissionError: the directory is accessible to others or belongs to another user.
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
