"""Handles a committed save with files that are still in a journal inside the folder of the checkpoint.

Readers read through the journal and change nothing (`current_files`). Only the next save or `recover` moves the files
to their places. Anybody can put such a journal into a checkpoint for download. So it is read and applied through
descriptors, without following links, and refused unless it is complete and belongs to the user.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oslo_models.checkpoint.checksum import file_checksum
from oslo_models.checkpoint.filenames import MANIFEST, CheckpointError, is_replaced_by_save, with_variant
from oslo_models.checkpoint.manifest import parse_manifest

JOURNAL = ".oslo_journal"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_DEPTH = 8


def current_files(directory: Path) -> dict[str, Path]:
    """Return the files of a checkpoint's folder by name, as after completion of an interrupted save.

    Raises:
        CheckpointError: there is an untrusted journal.
    """
    paths = {path.name: path for path in directory.iterdir() if path.is_file()} if directory.is_dir() else {}
    with _opened(directory) as journal:
        if journal is not None and journal.manifests:
            for manifest, content in journal.manifests.items():
                for name in [name for name in paths if _is_dropped(name, manifest, content)]:
                    del paths[name]
            paths |= {name: directory / JOURNAL / name for name in journal.files if "/" not in name}
    return paths


def current_folder(directory: str | os.PathLike[str], name: str) -> Path:
    """Return the folder of a checkpoint's file: the journal of an interrupted save, or ``directory``."""
    folder = Path(directory)
    if not os.path.lexists(folder / JOURNAL):
        return folder
    return current_files(folder).get(name, folder / name).parent


def identity(directory: Path) -> tuple[Any, ...]:
    """Return a value that changes when a save replaces the checkpoint in a folder or moves files there."""
    found: list[Any] = []
    for path in (directory, directory / JOURNAL):
        with suppress(OSError):
            status = os.stat(path, follow_symlinks=path == directory)
            found += [status.st_dev, status.st_ino, status.st_mtime_ns if path != directory else 0]
    return tuple(found)


def recover(directory: str | os.PathLike[str]) -> bool:
    """Finish a save that was interrupted in its last step. Return whether there was one.

    Raises:
        CheckpointError: the journal is not trusted, or its files cannot be moved.
    """
    return finish_interrupted_save(Path(os.path.realpath(directory)))


def finish_interrupted_save(target: Path, own: os.stat_result | None = None) -> bool:
    """Move the files of a journal into the checkpoint. Return whether there was a journal.

    Args:
        own: the folder that this save has just renamed to the journal.

    Raises:
        CheckpointError: the journal is not trusted or is not ``own``, or its files cannot be moved.
    """
    try:
        with _opened(target) as journal:
            if journal is None:
                return False
            if own is not None and not os.path.samestat(own, os.fstat(journal.fd)):
                raise CheckpointError(f"{target / JOURNAL} was exchanged by another process while it was saved")
            if own is None:
                journal.verify()
            for manifest, content in journal.manifests.items():
                journal.apply(manifest, content)
        shutil.rmtree(target / JOURNAL, ignore_errors=True)  # the manifests are moved last: all files have been moved
    except FileNotFoundError:
        return True  # another process finished it at the same time
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(
            f"{target} holds a save that was interrupted in its last step and could not be finished here: {error}; "
            "run oslo-models recover as a user who may write there"
        ) from error
    return True


@dataclass
class _Journal:
    """An open journal.

    Attributes:
        directory: the folder of the checkpoint.
        target: the descriptor of this folder.
        fd: the descriptor of the journal.
        files: the files in it, by their relative names.
        manifests: the contents of its manifests, by name.
    """

    directory: Path
    target: int
    fd: int
    files: dict[str, os.stat_result]
    manifests: dict[str, dict[str, Any]]

    def check(self) -> None:
        """Raise ``CheckpointError`` unless all files of the manifests are here or have been moved."""
        for manifest, content in self.manifests.items():
            if manifest != with_variant(MANIFEST, content.get("variant")):
                raise _refused(self.directory, manifest, "it is not the manifest of its variant")
            if not content["files"]:
                raise _refused(self.directory, manifest, "it names no files")
            for name, record in content["files"].items():
                status = self.files.get(name)
                with suppress(OSError):
                    status = status or os.stat(name, dir_fd=self.target, follow_symlinks=False)
                if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != record["size"]:
                    raise _refused(self.directory, name, f"no file of {record['size']} bytes as {manifest} says")

    def verify(self) -> None:
        """Raise ``CheckpointError`` unless all files match their checksums in the manifests."""
        for manifest, content in self.manifests.items():
            for name, record in content["files"].items():
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.fd if name in self.files else self.target)
                try:
                    if file_checksum(fd) != record["crc32"]:
                        raise _refused(self.directory, name, f"it does not have the checksum in {manifest}")
                finally:
                    os.close(fd)

    def apply(self, manifest: str, content: dict[str, Any]) -> None:
        """Remove the old checkpoint and move the new files to their places, the manifest last."""
        for name in os.listdir(self.target):
            if _is_dropped(name, manifest, content):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.target)
        _move(self.fd, self.target, set(self.manifests))
        _sync(self.target)
        os.replace(manifest, manifest, src_dir_fd=self.fd, dst_dir_fd=self.target)
        _sync(self.target)


@contextmanager
def _opened(directory: Path) -> Iterator[_Journal | None]:
    """Open the journal in a folder; ``None`` if there is none.

    Raises:
        CheckpointError: the journal is a link, contains links or files of another user, or lacks files of its manifest.
    """
    with ExitStack() as stack:
        try:
            target = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, target)
            fd = os.open(JOURNAL, _FOLDER, dir_fd=target)
            stack.callback(os.close, fd)
        except (FileNotFoundError, NotADirectoryError) as error:
            if os.path.lexists(directory / JOURNAL) and isinstance(error, NotADirectoryError):
                raise _refused(directory, "", "it is a link or a file, not a folder") from error
            yield None
            return
        except OSError as error:
            if os.path.lexists(directory / JOURNAL):
                raise _refused(directory, "", f"it cannot be opened as a folder ({error.strerror})") from error
            raise
        _check_owner(directory, "", os.fstat(fd))
        files = dict(_walk(directory, fd, ""))
        manifests = {}
        pattern = MANIFEST.removesuffix(".json")
        for name in sorted(files):
            if "/" not in name and name.startswith(pattern) and name.endswith(".json"):
                manifests[name] = _read(directory, fd, name)
        journal = _Journal(directory, target, fd, files, manifests)
        journal.check()
        yield journal


def _walk(directory: Path, fd: int, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield all files in a folder of the journal and below, by relative name."""
    for name in os.listdir(fd):
        path = prefix + name
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        _check_owner(directory, path, status)
        if stat.S_ISDIR(status.st_mode) and path.count("/") < _DEPTH:
            below = os.open(name, _FOLDER, dir_fd=fd)
            try:
                yield from _walk(directory, below, f"{path}/")
            finally:
                os.close(below)
        elif stat.S_ISREG(status.st_mode):
            yield path, status
        else:
            raise _refused(directory, path, "it is a link or another special file, or too deep")


def _read(directory: Path, fd: int, name: str) -> dict[str, Any]:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd)
    with open(descriptor, "rb") as file:
        return parse_manifest(directory / JOURNAL / name, file.read())


def _move(source: int, target: int, manifests: set[str]) -> None:
    """Move the files of one folder into another by descriptors, recursively."""
    for name in sorted(os.listdir(source)):
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=target)
            with ExitStack() as stack:
                from_folder = os.open(name, _FOLDER, dir_fd=source)
                stack.callback(os.close, from_folder)
                to_folder = os.open(name, _FOLDER, dir_fd=target)
                stack.callback(os.close, to_folder)
                _move(from_folder, to_folder, set())
        elif name not in manifests:
            with suppress(FileNotFoundError):
                os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)


def _is_dropped(name: str, manifest: str, content: dict[str, Any]) -> bool:
    """Return whether a file of the old checkpoint has no successor of the same name in the new checkpoint."""
    return is_replaced_by_save(name, content.get("variant")) and name not in content["files"] and name != manifest


def _check_owner(directory: Path, name: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _refused(directory, name, f"it belongs to user {status.st_uid}, and not to user {os.geteuid()}")


def _refused(directory: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{directory / JOURNAL / name} is not used to read or to finish an interrupted save: {why}. If the folder is a "
        f"download, remove {JOURNAL}, which no complete checkpoint has; if a save of yours was interrupted, run "
        "oslo-models recover as the user who saved"
    )


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot sync a folder
            raise
