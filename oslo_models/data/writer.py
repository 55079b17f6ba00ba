"""`Output`: files of a preprocessing run. They appear only when complete. A run can resume after a crash."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oslo_models.data.indexed_dataset import map_file, total, write_index


@dataclass
class WriteProgress:
    """Completed work at a commit.

    Attributes:
        inputs: the number of texts read.
        documents: the number of texts with tokens.
        tokens: the number of tokens of all documents.
        digest: a hash of the texts read.
        complete: whether only the move of the files to their final names is left.
    """

    inputs: int = 0
    documents: int = 0
    tokens: int = 0
    digest: str = ""
    complete: bool = False


def _read_state(path: Path) -> dict[str, Any]:
    """Read the state of an interrupted run. Raise ``ValueError`` if the file is damaged."""
    try:
        state: dict[str, Any] = json.loads(path.read_bytes())
        WriteProgress(**{name: value for name, value in state.items() if name != "settings"})
        return {**state, "settings": dict(state["settings"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete {path.parent} to start over") from error


class Output:
    """Files of one run, in the folder ``name.partial`` until `finish`.

    The files ``tokens`` and ``lengths`` only grow. ``progress.json`` records their valid size. It is replaced once this
    size is on disk.

    Raises:
        ValueError: another process writes the files, or the interrupted run had other settings.
    """

    def __init__(self, name: str, dtype: str, settings: dict[str, Any], resume: bool) -> None:
        self.name, self.folder, self.dtype = name, Path(name + ".partial"), np.dtype(dtype)
        self.progress = WriteProgress()
        self._settings = {**settings, "dtype": dtype, "format": 1}
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            self._begin(resume)
        except BaseException:
            os.close(self._lock)
            raise

    def _begin(self, resume: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {self.name} (it holds {self.folder})") from None
        state = self.folder / "progress.json"
        if resume and state.exists():
            self._resume(_read_state(state))
        else:
            state.unlink(missing_ok=True)  # before the files it describes
        self._tokens = self._open("tokens", self.progress.tokens * self.dtype.itemsize)
        self._lengths = self._open("lengths", self.progress.documents * 4)
        if total(map_file(self.folder / "lengths", np.dtype(np.int32))) != self.progress.tokens:
            raise ValueError(f"{self.folder / 'lengths'} is damaged; delete {self.folder} to start over")

    def _resume(self, state: dict[str, Any]) -> None:
        settings = state.pop("settings")
        if different := sorted(key for key in self._settings if self._settings[key] != settings.get(key)):
            raise ValueError(
                f"{self.folder} was started with another {' and '.join(different)}; delete it or pass resume=False to "
                "start over"
            )
        self.progress = WriteProgress(**state)
        data, placed = self.folder / "tokens", Path(self.name + ".bin")
        if self.progress.complete and not data.exists():  # interrupted during the move: undo it
            if not placed.exists() or placed.stat().st_size != self.progress.tokens * self.dtype.itemsize:
                self.progress = WriteProgress()
                return
            Path(self.name + ".idx").unlink(missing_ok=True)
            placed.replace(data)
        self.progress.complete = False

    def _open(self, name: str, size: int) -> Any:
        """Open a file for appending, truncated to its valid part."""
        path = self.folder / name
        path.touch()
        if path.stat().st_size < size:
            raise ValueError(f"{path} is shorter than its record of progress; delete {self.folder} to start over")
        os.truncate(path, size)
        return path.open("ab")

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._tokens.close()
        self._lengths.close()
        os.close(self._lock)

    def append(self, inputs: int, lengths: NDArray[np.int32], tokens: NDArray[Any]) -> None:
        """Add the documents of ``inputs`` texts."""
        self._tokens.write(tokens.data)
        self._lengths.write(lengths.data)
        self.progress.inputs += inputs
        self.progress.documents += len(lengths)
        self.progress.tokens += len(tokens)

    def commit(self, digest: str) -> None:
        """Make all data added so far durable."""
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fdatasync(file.fileno())
        self.progress.digest = digest
        state, new = self.folder / "progress.json", self.folder / "progress.new"
        with new.open("w") as file:
            json.dump({**asdict(self.progress), "settings": self._settings}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(state)

    def finish(self, impl: str) -> None:
        """Write the index and move the files to their final names: the index last, after removal of an older index."""
        index = self.folder / "index"
        write_index(index, map_file(self.folder / "lengths", np.dtype(np.int32)), self.dtype, impl)
        self.progress.complete = True
        self.commit(self.progress.digest)
        placed = Path(self.name + ".idx")
        placed.unlink(missing_ok=True)
        (self.folder / "tokens").replace(self.name + ".bin")
        index.replace(placed)
        parent = os.open(placed.parent, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
        shutil.rmtree(self.folder)
