"""Replaces a checkpoint atomically: a crash at any point leaves the complete old one or the complete new one.

All files are written into a staging directory beside the target. Files of the target that the new checkpoint does not
replace (a tokenizer, logs) are hard-linked into it, and one system call exchanges the two directories.

Where this is impossible (the target has subdirectories, is a mount point or the working directory of a process, or the
file system has no exchange or no hard links), the staging directory is renamed to a journal inside the target. This
rename is the commit. The saving process then moves the files out of the journal into the target; if it dies, the next
reader or save does.
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
def replace_atomically(
    directory: str | os.PathLike[str], world: Axis, nbytes: int, variant: str | None = None
) -> Iterator[Path]:
    """Yield a staging directory that replaces the checkpoint in ``directory`` when the block ends. A collective.

    If the block raises, on all ranks, the old checkpoint stays and the staging directory is removed.

    Args:
        directory: the target; need not exist.
        world: all ranks that write files.
        nbytes: the number of bytes that this rank will write.
        variant: the variant of the checkpoint; only files of the same variant are replaced.

    Raises:
        OSError: on every rank, when the directory cannot be written or the disk has too little space.
    """
    reports = gather_objects(world, (nbytes, _working_directory()))
    target, staging = Path(os.path.realpath(directory)), None
    with ExitStack() as stack:
        with agree(world, f"saving to {directory}"):
            if world.rank == 0:
                total, working_directories = sum(count for count, _ in reports), [folder for _, folder in reports]
                staging = stack.enter_context(_staging_directory(target, total, working_directories))
        yield broadcast_object(world, staging)
        with agree(world, f"saving to {directory}"):
            if staging is not None:
                _commit(staging, target, variant)


def finish_interrupted_save(target: Path) -> None:
    """Move the files of a journal, if there is one, into the checkpoint. Several processes may do so at the same time.

    Raises:
        CheckpointError: there is a journal, and its files cannot be moved.
    """
    journal = target / JOURNAL
    try:
        for manifest in journal.glob(MANIFEST.replace(".json", "*.json")):
            _apply_journal(target, journal, manifest)
        if journal.is_dir():  # the manifest is moved last: without one, all files have been moved
            shutil.rmtree(journal, ignore_errors=True)
    except FileNotFoundError:
        return  # another process finished it at the same time
    except OSError as error:
        raise CheckpointError(
            f"{target} holds a save that was interrupted in its last step and could not be finished here: {error}; "
            "open it once as a user who may write there"
        ) from error


def _apply_journal(target: Path, journal: Path, manifest: Path) -> None:
    """Remove the old checkpoint from ``target`` and move the new files there, their manifest last."""
    content = read_manifest(manifest)
    for name in os.listdir(target):
        if is_replaced_by_save(name, content["variant"]) and name not in content["files"] and name != manifest.name:
            (target / name).unlink(missing_ok=True)
    for entry in sorted(journal.rglob("*")):  # a folder comes before its files
        destination = target / entry.relative_to(journal)
        if entry.is_dir():
            destination.mkdir(exist_ok=True)
        elif entry != manifest:
            with suppress(FileNotFoundError):
                os.replace(entry, destination)
    _sync(target)
    os.replace(manifest, target / manifest.name)
    _sync(target)


@contextmanager
def _staging_directory(target: Path, nbytes: int, working_directories: Sequence[str]) -> Iterator[Path]:
    """Create a directory beside the target, or inside it where the two cannot be exchanged; remove it at the end.

    At the end it holds incomplete files after a failure, or the old checkpoint after an exchange.
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
        # An exchange gives the target another inode: a mount point, or processes that work in the target, would keep
        # the old one.
        in_use = os.path.ismount(target) or any(Path(path).is_relative_to(target) for path in working_directories)
        if in_use or not os.access(parent, os.W_OK):
            parent = target
    for leftover in (*target.parent.glob(f".{target.name}.saving-*"), *target.glob(f".{target.name}.saving-*")):
        with suppress(BlockingIOError, FileNotFoundError):  # its save is still running, or has just removed it
            os.close(_lock(leftover))
            shutil.rmtree(leftover, ignore_errors=True)
    usage = shutil.disk_usage(parent)
    if usage.total and usage.free < nbytes:
        raise OSError(errno.ENOSPC, f"cannot save to {target}: {nbytes} bytes are needed, {usage.free} are free")
    staging = parent / f".{target.name}.saving-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    lock = _lock(staging)
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _commit(staging: Path, target: Path, variant: str | None) -> None:
    """Sync all files of the staging directory to disk, then replace the checkpoint in the target with them."""
    for entry in (staging, *staging.rglob("*")):
        if entry.is_file() or entry.is_dir():
            _sync(entry)
    if not target.exists():
        os.rename(staging, target)
        _sync(target.parent)
    elif staging.parent == target or not _exchange(staging, target, variant):
        os.rename(staging, target / JOURNAL)
        _sync(target)
        finish_interrupted_save(target)


def _exchange(staging: Path, target: Path, variant: str | None) -> bool:
    """Exchange the staging directory with the target. Returns ``False``, with both unchanged, if that is impossible."""
    new = set(os.listdir(staging))

    def is_kept(entry: Path) -> bool:
        return entry.name not in new and not is_replaced_by_save(entry.name, variant)

    kept = [entry for entry in target.iterdir() if is_kept(entry)]
    try:
        for entry in kept:
            os.link(entry, staging / entry.name, follow_symlinks=False)  # fails for a directory
        owner = target.stat()
        with suppress(PermissionError):  # only root may change the owner of a directory
            os.chown(staging, owner.st_uid, owner.st_gid)
        shutil.copystat(target, staging)
        _sync(staging)
        _rename_exchange(staging, target)
    except OSError:
        for entry in kept:
            (staging / entry.name).unlink(missing_ok=True)
        return False
    for entry in filter(is_kept, staging.iterdir()):  # the former target
        current = target / entry.name
        if not (current.exists() and current.samefile(entry)):
            os.replace(entry, current)  # another process wrote it after the links were made
    _sync(staging.parent)
    return True


def _rename_exchange(a: Path, b: Path) -> None:
    """Exchange two directories in one system call. Raises ``OSError`` where system or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "no renameat2 in the C library")
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def _lock(path: Path) -> int:
    """Open and lock a directory. Raises ``BlockingIOError`` if another process holds the lock."""
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
