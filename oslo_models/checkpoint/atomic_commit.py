"""Replaces a checkpoint atomically: a crash at any point leaves the complete old or the complete new checkpoint.

All files are written into a staging directory beside the target. Files of the target that the new checkpoint does not
replace (a tokenizer, logs) are hard-linked into it, and one system call exchanges the two directories.

Where this is impossible (the target has subdirectories, is a mount point or the working directory of a process, or the
file system has no exchange or no hard links), the staging directory is renamed to a journal inside the target. This
rename is the commit. The saving process then moves the files out of the journal into the target. If it dies, readers
read through the journal, and the next save or `recover` moves the files.

The parent of the target may belong to another user. So all created files are accessed through descriptors, and a save
raises an error if its folder was exchanged.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from oslo_models.checkpoint.filenames import CheckpointError, is_replaced_by_save
from oslo_models.checkpoint.journal import JOURNAL, finish_interrupted_save
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, broadcast_object, gather_objects

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def replace_atomically(
    directory: str | os.PathLike[str], world: Axis, nbytes: int, variant: str | None = None
) -> Iterator[Path]:
    """Yield a staging directory that replaces the checkpoint in ``directory`` when the block ends. A collective.

    If the block raises, on all ranks, the old checkpoint stays and the staging directory is removed.

    Args:
        directory: the target directory. It need not exist.
        world: all ranks that write files.
        nbytes: the number of bytes that this rank will write.
        variant: the variant of the checkpoint. Only files of the same variant are replaced.

    Raises:
        OSError: on every rank, if the directory cannot be written or the disk has too little space.
    """
    reports = gather_objects(world, (nbytes, _working_directory()))
    target = Path(os.path.realpath(directory))
    staging: _Staging | None = None
    with ExitStack() as stack:
        with agree(world, f"saving to {directory}"):
            if world.rank == 0:
                total, working_directories = sum(count for count, _ in reports), [folder for _, folder in reports]
                staging = stack.enter_context(_staging_directory(target, total, working_directories))
        made = broadcast_object(world, None if staging is None else (staging.path, staging.number))
        with agree(world, f"saving to {directory}"):
            fd = _open_folder(made[0])
            stack.callback(os.close, fd)
            if os.fstat(fd).st_ino != made[1]:
                raise _exchanged(made[0])
        yield _through(fd, made[0])
        with agree(world, f"saving to {directory}"):
            if staging is not None:
                _commit(staging, target, variant)


@dataclass(frozen=True)
class _Staging:
    """Staging directory of a save.

    Attributes:
        path: its path.
        fd: its descriptor.
        number: its inode.
    """

    path: Path
    fd: int
    number: int

    def check(self, path: Path) -> None:
        """Raise ``CheckpointError`` unless ``path`` is this directory."""
        if not os.path.samestat(os.fstat(self.fd), os.lstat(path)):
            raise _exchanged(path)


@contextmanager
def _staging_directory(target: Path, nbytes: int, working_directories: Sequence[str]) -> Iterator[_Staging]:
    """Create a directory beside the target, or inside it if an exchange is impossible. Remove it at the end.

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
        # An exchange gives the target another inode. Mount points and processes inside the target would keep the old
        # inode.
        in_use = os.path.ismount(target) or any(Path(path).is_relative_to(target) for path in working_directories)
        if in_use or not os.access(parent, os.W_OK):
            parent = target
    for leftover in (*target.parent.glob(f".{target.name}.saving-*"), *target.glob(f".{target.name}.saving-*")):
        with suppress(OSError):  # its save is still running or has just removed it, or it is not a folder
            os.close(_lock(leftover))
            shutil.rmtree(leftover, ignore_errors=True)
    usage = shutil.disk_usage(parent)
    if usage.total and usage.free < nbytes:
        raise OSError(errno.ENOSPC, f"cannot save to {target}: {nbytes} bytes are needed, {usage.free} are free")
    staging = parent / f".{target.name}.saving-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    lock = _lock(staging)
    try:
        status = os.fstat(lock)
        yield _Staging(staging, lock, status.st_ino)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


def _commit(staging: _Staging, target: Path, variant: str | None) -> None:
    """Sync all files of the staging directory to disk, then replace the checkpoint in the target with them."""
    folder = _through(staging.fd, staging.path)
    for entry in folder.rglob("*"):
        if not entry.is_symlink() and (entry.is_file() or entry.is_dir()):
            _sync(entry)
    _sync_fd(staging.fd)
    staging.check(staging.path)
    if not os.path.lexists(target):
        os.rename(staging.path, target)
        staging.check(target)
        _sync(target.parent)
    elif staging.path.parent == target or not _exchange(staging, target, variant):
        os.rename(staging.path, target / JOURNAL)
        _sync(target)
        finish_interrupted_save(target, os.fstat(staging.fd))


def _exchange(staging: _Staging, target: Path, variant: str | None) -> bool:
    """Exchange the staging directory with the target. Return ``False``, with both unchanged, if this is impossible."""
    new = set(os.listdir(staging.fd))

    def is_kept(name: str) -> bool:
        return name not in new and not is_replaced_by_save(name, variant)

    old = _open_folder(target)
    try:
        kept = list(filter(is_kept, os.listdir(old)))
        try:
            for name in kept:
                os.link(name, name, src_dir_fd=old, dst_dir_fd=staging.fd, follow_symlinks=False)  # not a directory
            _copy_status(old, staging.fd)
            _sync_fd(staging.fd)
            _rename_exchange(staging.path, target)
        except OSError:
            for name in kept:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=staging.fd)
            return False
        staging.check(target)
        for name in filter(is_kept, os.listdir(old)):  # the former target
            if not _is_same(name, old, staging.fd):
                os.replace(name, name, src_dir_fd=old, dst_dir_fd=staging.fd)  # written after the links were created
    finally:
        os.close(old)
    _sync(target.parent)
    return True


def _copy_status(source: int, target: int) -> None:
    """Copy owner, mode and extended attributes from one folder to another."""
    status = os.fstat(source)
    with suppress(PermissionError):  # only root may change the owner of a directory
        os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    if hasattr(os, "listxattr"):
        with suppress(OSError):  # a file system without them
            for name in os.listxattr(source):
                os.setxattr(target, name, os.getxattr(source, name))


def _is_same(name: str, one: int, other: int) -> bool:
    """Return whether two folders have the same file under this name."""
    with suppress(FileNotFoundError):
        first, second = (os.stat(name, dir_fd=fd, follow_symlinks=False) for fd in (one, other))
        return os.path.samestat(first, second)
    return False


def _open_folder(path: Path) -> int:
    """Open a directory without following links. Raise ``CheckpointError`` if the path is not a directory."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError as error:
        raise _exchanged(path) from error


def _through(fd: int, path: Path) -> Path:
    """Return a path to a directory through its descriptor, if the system supports such paths."""
    through = Path(f"/proc/self/fd/{fd}")
    return through if through.exists() else path


def _exchanged(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} was exchanged by another process while a checkpoint was saved: do not rely on it. Save to a folder "
        "in a parent folder that no other user may write to"
    )


def _rename_exchange(a: Path, b: Path) -> None:
    """Exchange two directories in one system call. Raise ``OSError`` if system or file system do not support this."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        raise OSError(errno.ENOSYS, "no renameat2 in the C library")
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(b))


def _lock(path: Path) -> int:
    """Open and lock a directory. Raise ``BlockingIOError`` if another process holds the lock."""
    fd = _open_folder(path)
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
        _sync_fd(fd)
    finally:
        os.close(fd)


def _sync_fd(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if not (error.errno == errno.EINVAL and stat.S_ISDIR(os.fstat(fd).st_mode)):  # some file systems cannot
            raise


def _working_directory() -> str:
    with suppress(FileNotFoundError):
        return os.path.realpath(os.getcwd())
    return ""
