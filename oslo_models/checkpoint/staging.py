"""Puts a new checkpoint in the place of an old one, so that whatever dies whenever, the old or the new one is there.

Everything is written into a staging directory beside the target. What the new checkpoint does not replace (a tokenizer,
logs) is hard-linked into it, and the two directories are exchanged by one system call. Where that cannot be done (other
directories in the target, a mount point, a process that works there, file systems without exchange or hard links), the
staging directory is renamed to a journal inside the target. From then on the new checkpoint counts, and whoever comes
next, this save or a reader, moves the files out of the journal into their places.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from oslo_models.checkpoint.manifest import read_manifest
from oslo_models.checkpoint.names import MANIFEST, CheckpointError, is_replaced_by_save
from oslo_models.collectives import agree, broadcast_object, gather_objects
from oslo_models.mesh import Axis

JOURNAL = ".oslo_journal"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replacing(
    directory: str | os.PathLike[str], world: Axis, needed: int, variant: str | None = None
) -> Iterator[Path]:
    """Yield a staging directory whose content becomes that of ``directory`` when the block ends. A collective.

    A block that raises has to raise on all ranks; the old content then stays and the staging directory is removed.

    Args:
        needed: how many bytes this rank will write.
        variant: the variant of the checkpoint, which says what of the old content it replaces.

    Raises:
        OSError: on every rank, when the directory cannot be written or there is too little space.
    """
    uses = gather_objects(world, (needed, _working_directory()))
    staging = _Staging(Path(os.path.realpath(directory)), variant) if world.rank == 0 else None
    try:
        with agree(world, f"saving to {directory}"):
            if staging:
                staging.begin(sum(count for count, _ in uses), [folder for _, folder in uses])
        yield broadcast_object(world, staging and staging.path)
        with agree(world, f"saving to {directory}"):
            if staging:
                staging.commit()
    finally:
        if staging:
            staging.discard()


def finish_interrupted_save(target: Path) -> None:
    """Move the files of a journal, if there is one, into their places. Any number of processes may do it at once.

    Raises:
        CheckpointError: there is a journal and no permission to move its files.
    """
    journal = target / JOURNAL
    try:
        for manifest in journal.glob(MANIFEST.replace(".json", "*.json")):
            _move_into_place(target, journal, manifest)
        if journal.is_dir():  # what has no manifest has been moved, the manifest being the last
            shutil.rmtree(journal, ignore_errors=True)
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        raise CheckpointError(
            f"{target} holds a save that was interrupted in its last step and could not be finished here: {error}; "
            "open it once where it may be written"
        ) from error


def _move_into_place(target: Path, journal: Path, manifest: Path) -> None:
    content = read_manifest(manifest)
    for name in os.listdir(target):
        if is_replaced_by_save(name, content["variant"]) and name not in content["files"] and name != manifest.name:
            (target / name).unlink(missing_ok=True)
    for folder, _, names in os.walk(journal):
        place = target / Path(folder).relative_to(journal)
        place.mkdir(exist_ok=True)
        for name in names:
            if Path(folder, name) != manifest:
                with suppress(FileNotFoundError):
                    os.replace(Path(folder, name), place / name)
    _sync(target)
    os.replace(manifest, target / manifest.name)
    _sync(target)


class _Staging:
    """The staging directory of one save; exists on world rank 0 only."""

    def __init__(self, target: Path, variant: str | None) -> None:
        self.target, self.variant = target, variant
        self.path: Path | None = None
        self._lock = -1

    def begin(self, needed: int, working_directories: Sequence[str]) -> None:
        """Make the directory where it can be exchanged with the target or, failing that, inside the target."""
        target = self.target
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"cannot save to {target}: it is a file; name a directory")
        missing = [folder for folder in target.parents if not folder.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)
        finish_interrupted_save(target)
        inside = False
        if target.exists():
            if not os.access(target, os.W_OK):
                raise PermissionError(f"cannot save to {target}: no permission to write there")
            # An exchange gives the directory another identity, under which these would go on seeing the old one.
            in_use = os.path.ismount(target) or any(Path(path).is_relative_to(target) for path in working_directories)
            inside = in_use or not os.access(target.parent, os.W_OK)
        parent = target if inside else target.parent
        for leftover in (*target.parent.glob(f".{target.name}.saving-*"), *target.glob(f".{target.name}.saving-*")):
            _remove_if_dead(leftover)
        usage = shutil.disk_usage(parent)
        if usage.total and usage.free < needed:
            raise OSError(errno.ENOSPC, f"cannot save to {target}: {needed} bytes are needed, {usage.free} are free")
        path = parent / f".{target.name}.saving-{uuid.uuid4().hex[:8]}"
        path.mkdir()
        self.path = path
        self._lock = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def commit(self) -> None:
        """Make everything durable and put it in the place of the target."""
        assert self.path is not None
        _sync_tree(self.path)
        if not self.target.exists():
            os.rename(self.path, self.target)
            _sync(self.target.parent)
        elif self.path.parent == self.target or not self._exchange(self.path):
            os.rename(self.path, self.target / JOURNAL)
            _sync(self.target)
            finish_interrupted_save(self.target)

    def discard(self) -> None:
        """Remove what is not the target: a staging directory after a failure, the old content after an exchange."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)

    def _exchange(self, path: Path) -> bool:
        """Exchange the staging directory with the target, if that can be done here."""
        new, target = set(os.listdir(path)), self.target
        kept = [entry for entry in target.iterdir() if self._is_kept(entry, new)]
        try:
            for entry in kept:
                os.link(entry, path / entry.name, follow_symlinks=False)  # fails for a directory
            owner = target.stat()
            with suppress(PermissionError):  # only root may give a directory away
                os.chown(path, owner.st_uid, owner.st_gid)
            shutil.copystat(target, path)
            _sync(path)
            _rename_exchange(path, target)
        except OSError:
            for entry in kept:
                (path / entry.name).unlink(missing_ok=True)
            return False
        for entry in path.iterdir():
            place = target / entry.name
            if self._is_kept(entry, new) and not (place.exists() and place.samefile(entry)):
                os.replace(entry, place)  # somebody else wrote it after the links were made
        _sync(path.parent)
        return True

    def _is_kept(self, entry: Path, new: Container[str]) -> bool:
        """Whether an entry of the target stays there beside the ``new`` ones."""
        return entry.name not in new and not is_replaced_by_save(entry.name, self.variant)


def _rename_exchange(a: Path, b: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "no renameat2 in the C library")
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def _remove_if_dead(leftover: Path) -> None:
    """Remove what a save that died left behind; one that lives holds a lock."""
    fd = os.open(leftover, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:  # a file system without locks
        pass
    finally:
        os.close(fd)
    shutil.rmtree(leftover, ignore_errors=True)


def _sync_tree(path: Path) -> None:
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            if Path(folder, name).is_file():
                _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if not (error.errno == errno.EINVAL and path.is_dir()):  # some file systems cannot sync a directory
            raise
    finally:
        os.close(fd)


def _working_directory() -> str:
    try:
        return os.path.realpath(os.getcwd())
    except FileNotFoundError:
        return ""
