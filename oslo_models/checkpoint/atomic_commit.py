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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from oslo_models.checkpoint.filenames import MANIFEST, CheckpointError, is_replaced_by_save
from oslo_models.checkpoint.manifest import read_manifest
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, broadcast_object, gather_objects

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
    target, path = Path(os.path.realpath(directory)), None
    with ExitStack() as stack:
        with agree(world, f"saving to {directory}"):
            if world.rank == 0:
                total, folders = sum(count for count, _ in uses), [folder for _, folder in uses]
                path = stack.enter_context(_staging(target, total, folders))
        yield broadcast_object(world, path)
        with agree(world, f"saving to {directory}"):
            if path is not None:
                _commit(path, target, variant)


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
    for entry in sorted(journal.rglob("*")):  # a folder comes before what is in it
        place = target / entry.relative_to(journal)
        if entry.is_dir():
            place.mkdir(exist_ok=True)
        elif entry != manifest:
            with suppress(FileNotFoundError):
                os.replace(entry, place)
    _sync(target)
    os.replace(manifest, target / manifest.name)
    _sync(target)


@contextmanager
def _staging(target: Path, needed: int, working_directories: Sequence[str]) -> Iterator[Path]:
    """A new directory where it can be exchanged with the target or, failing that, inside the target.

    What is there in the end is removed: what was written before a failure, or the old content after an exchange.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"cannot save to {target}: it is a file; name a directory")
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync(folder.parent)
    finish_interrupted_save(target)
    parent = target.parent
    if target.exists():
        if not os.access(target, os.W_OK):
            raise PermissionError(f"cannot save to {target}: no permission to write there")
        # An exchange gives the directory another identity, under which these would go on seeing the old one.
        in_use = os.path.ismount(target) or any(Path(path).is_relative_to(target) for path in working_directories)
        if in_use or not os.access(parent, os.W_OK):
            parent = target
    for leftover in (*target.parent.glob(f".{target.name}.saving-*"), *target.glob(f".{target.name}.saving-*")):
        with suppress(BlockingIOError, FileNotFoundError):  # the save that made it is alive, or it is gone
            os.close(_lock(leftover))
            shutil.rmtree(leftover, ignore_errors=True)
    usage = shutil.disk_usage(parent)
    if usage.total and usage.free < needed:
        raise OSError(errno.ENOSPC, f"cannot save to {target}: {needed} bytes are needed, {usage.free} are free")
    path = parent / f".{target.name}.saving-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    lock = _lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _commit(path: Path, target: Path, variant: str | None) -> None:
    """Make everything in the staging directory durable and put it in the place of the target."""
    for entry in (path, *path.rglob("*")):
        if entry.is_file() or entry.is_dir():
            _sync(entry)
    if not target.exists():
        os.rename(path, target)
        _sync(target.parent)
    elif path.parent == target or not _exchange(path, target, variant):
        os.rename(path, target / JOURNAL)
        _sync(target)
        finish_interrupted_save(target)


def _exchange(path: Path, target: Path, variant: str | None) -> bool:
    """Exchange the staging directory with the target, if that can be done here."""
    new = set(os.listdir(path))

    def stays(entry: Path) -> bool:
        return entry.name not in new and not is_replaced_by_save(entry.name, variant)

    kept = [entry for entry in target.iterdir() if stays(entry)]
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
    for entry in filter(stays, path.iterdir()):
        place = target / entry.name
        if not (place.exists() and place.samefile(entry)):
            os.replace(entry, place)  # somebody else wrote it after the links were made
    _sync(path.parent)
    return True


def _rename_exchange(a: Path, b: Path) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "no renameat2 in the C library")
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def _lock(path: Path) -> int:
    """Open a directory and lock it. Raises ``BlockingIOError`` when another process has."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:  # a file system without locks
        pass
    return fd


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
    with suppress(FileNotFoundError):
        return os.path.realpath(os.getcwd())
    return ""
