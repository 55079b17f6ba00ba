"""Kills a save at each system call that changes files, or fails that call, and checks the remaining files.

Run as a script: it imports torch once and forks a child for each disturbance. ptrace stops the child before each of its
system calls, so that it sees every way of writing. Prints one JSON object per scenario.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from oslo_models.checkpoint import atomic_commit as staging
from oslo_models.checkpoint import current_files, open_checkpoint, save_checkpoint, verify_checkpoint
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.sharding.layout import EvenSplit, Layout

_X86 = dict(write=1, pwrite64=18, writev=20, sendfile=40, fsync=74, fdatasync=75, ftruncate=77, rename=82, mkdir=83)
_X86 |= dict(rmdir=84, link=86, unlink=87, symlink=88, chmod=90, fchmod=91, openat=257, mkdirat=258, unlinkat=263)
_X86 |= dict(renameat=264, linkat=265, symlinkat=266, fchmodat=268, fallocate=285, renameat2=316, copy_file_range=326)
_ARM = dict(mkdirat=34, unlinkat=35, symlinkat=36, linkat=37, renameat=38, ftruncate=46, fallocate=47, fchmod=52)
_ARM |= dict(fchmodat=53, openat=56, write=64, writev=66, pwrite64=68, sendfile=71, fsync=82, fdatasync=83)
_ARM |= dict(renameat2=276, copy_file_range=285)
CHANGES = {number: name for name, number in {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), {}).items()}

_TRACEME, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_SYSGOOD, _EXITKILL, _ENTRY = 1, 0x100000, 1
_POKEUSER, _ORIG_RAX, _RAX = 6, 15 * 8, 10 * 8  # of x86-64


class _Info(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, address: int = 0, data: Any = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        raise OSError(ctypes.get_errno(), "ptrace is not permitted here")


def fork(function: Callable[[], None]) -> int:
    """Run ``function`` in a forked process, which ends afterwards."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        function()
        code = 0
    except OSError:
        code = 2
    finally:
        os._exit(code)


def be_traced() -> None:
    """Let the parent trace this thread from now on."""
    _ptrace(_TRACEME, 0)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def trace(pid: int, point: int | None, fail: bool) -> tuple[list[str], int]:
    """Trace a child until it ends. Before change number ``point``, kill it or let the system call fail.

    Returns:
        The changes up to ``point`` or the end, and the exit status.
    """
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, 0, _SYSGOOD | _EXITKILL)
    changes: list[str] = []
    info = _Info()
    pass_on, failing = 0, False
    while True:
        with suppress(ProcessLookupError):  # killed
            _ptrace(_SYSCALL, pid, 0, pass_on)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return changes, status
        pass_on = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            pass_on = os.WSTOPSIG(status)
            continue
        if failing:
            _ptrace(_POKEUSER, pid, _RAX, -errno.ENOSPC)
            failing = False
        _ptrace(_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
        name = CHANGES.get(info.number)
        if info.op != _ENTRY or name is None or len(changes) == point:
            continue
        if name == "openat" and not info.args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            continue
        changes.append(name)
        if len(changes) == point and fail:
            _ptrace(_POKEUSER, pid, _ORIG_RAX, -1)  # no system call
            failing = True
        elif len(changes) == point:
            os.kill(pid, signal.SIGKILL)


def tensors_of(generation: int, tp_rank: int = 0, tp: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
    """A tiny model: some names occur in every generation, one in this generation only."""
    generator = torch.Generator().manual_seed(generation)
    shapes = {"wte": (6, 4), "up": (4, 8), "norm": (4,), "big": (40, 100), f"only_in_{generation}": (2, 2)}
    full = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    layouts = {name: Layout(shape) for name, shape in shapes.items()}
    layouts["wte"] = Layout.sharded((6, 4), 0, (EvenSplit(6),), tp)
    layouts["up"] = Layout.sharded((4, 8), 1, (EvenSplit(4), EvenSplit(4)), tp)
    return {name: layouts[name].shard(full[name], tp_rank).contiguous() for name in full}, layouts


def fake_mesh(tp_rank: int = 0, tp: int = 1) -> Any:
    axes = {name: Axis(name, 0, (0,), None) for name in ("pp", "dp")}
    if tp == 1:
        axes |= {name: Axis(name, 0, (0,), None) for name in ("tp", "cp", "model", "weights", "world", "experts")}
        return SimpleNamespace(**axes, copy_rank=0, rank_in=lambda _: 0, is_over_replicas=lambda _: False)
    return ParallelMesh(tensor_parallel_size=tp, timeout=4)  # a short timeout reports a dead rank early


def save(directory: Path, generation: int, how: str, mesh: Any) -> None:
    tensors, layouts = tensors_of(generation, mesh.tp.rank, mesh.tp.size)

    def files(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"generation": generation}))

    common = dict(tied={}, files=files, metadata={"generation": generation})
    if how == "split":
        save_checkpoint(directory, tensors, layouts, mesh, merging=False, **common)
    elif how == "safe split":
        save_checkpoint(directory, tensors, layouts, mesh, merging=False, safe_serialization=True, **common)
    elif how == "sharded":
        save_checkpoint(directory, tensors, layouts, mesh, merging=True, max_shard_size=150, **common)
    else:
        save_checkpoint(directory, tensors, layouts, mesh, merging=True, safe_serialization=False, **common)


def look(directory: Path) -> int | None:
    """Return the generation of the complete checkpoint; ``None`` without a checkpoint. Any other state raises."""
    try:
        reader = open_checkpoint(directory)
    except FileNotFoundError:
        return None
    verify_checkpoint(reader, Axis("world", 0, (0,), None))
    assert reader.manifest is not None
    generation = reader.manifest["generation"]
    tensors, _ = tensors_of(generation)
    assert reader.tensors.keys() == tensors.keys(), f"{reader.tensors.keys()} in generation {generation}"
    for name, expected in tensors.items():
        assert torch.equal(reader.read(name, Layout(tuple(expected.shape)), 0), expected), name
    reader.close()
    config = json.loads(current_files(directory)["config.json"].read_text())  # readers look through the journal
    assert config == {"generation": generation}, f"{config} beside weights of generation {generation}"
    return generation


def no_exchange(*_: Path) -> None:
    raise OSError(errno.EINVAL, "exchange switched off")


SCENARIOS = {
    # name: (existing checkpoint, new checkpoint, way of replacing, number of ranks, killed rank)
    "fresh split": (None, "split", "rename", 1, 0),
    "fresh merged bin": (None, "bin", "rename", 1, 0),
    "split over split": ("split", "split", "exchange", 1, 0),
    "sharded over split": ("split", "sharded", "exchange", 1, 0),
    "safe split over sharded, journal": ("sharded", "safe split", "journal", 1, 0),
    "sharded over split, no exchange": ("split", "sharded", "no exchange", 1, 0),
    "sharded over sharded, working there": ("sharded", "sharded", "inside", 1, 0),
    "two ranks, first killed": ("split", "split", "exchange", 2, 0),
    "two ranks, second killed": ("split", "split", "exchange", 2, 1),
}


def child(directory: Path, how: str, place: str, rank: int, ranks: int, traced: bool, store: Path) -> None:
    if place == "no exchange":
        staging._rename_exchange = no_exchange
    if place == "inside":
        os.chdir(directory)
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=10),
        )
    mesh = fake_mesh(rank, ranks)
    for _ in range(2):  # these connect the shared memory of the ranks; a save works without it
        gather_objects(mesh.world, None)
    if traced:
        be_traced()
    save(directory, 2, how, mesh)


def attempt(folder: Path, scenario: str, point: int | None, fail: bool) -> tuple[list[str], int | None]:
    """Run a save, disturbed or not; return its changes until then, and the generation in the directory afterwards."""
    before, how, place, ranks, victim = SCENARIOS[scenario]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    target = folder / "model"
    if before is not None:
        save(target, 1, before, fake_mesh())
        (target / "tokenizer.json").write_text("kept")
        (target / "link").symlink_to("tokenizer.json")
        if place == "journal":
            (target / "runs").mkdir()
            (target / "runs" / "log").write_text("kept")
    store = folder / "store"
    pids = [
        fork(lambda rank=rank: child(target, how, place, rank, ranks, rank == victim, store)) for rank in range(ranks)
    ]
    changes, status = trace(pids[victim], point, fail)
    statuses = {status, *(os.waitpid(pid, 0)[1] for rank, pid in enumerate(pids) if rank != victim)}
    store.unlink(missing_ok=True)
    generation = look(target)
    assert generation in ((1, 2) if before else (None, 2)), generation
    if point is None or fail:
        assert statuses in ({0}, {2 << 8}), statuses  # all ranks succeed, or all raise an OSError
        assert generation == 2 or statuses == {2 << 8}, "the save seemed to succeed"
        leftovers = hidden(folder)
        assert not leftovers or changes[-1] in ("unlink", "unlinkat", "rmdir"), leftovers
    save(target, 3, how, fake_mesh())
    assert look(target) == 3
    if before is not None:
        assert (target / "link").is_symlink() and (target / "link").read_text() == "kept"
        assert place != "journal" or (target / "runs" / "log").read_text() == "kept"
    assert not hidden(folder)
    return changes, generation


def hidden(folder: Path) -> list[str]:
    return [str(path) for path in [*folder.glob(".*"), *folder.glob("*/.*")]]


def run(scenario: str, folder: Path, fail: bool) -> dict[str, Any]:
    start = time.monotonic()
    changes, _ = attempt(folder, scenario, None, fail)
    found: dict[str, int] = {}
    failures = []
    for point in range(1, len(changes) + 1):
        try:
            _, generation = attempt(folder, scenario, point, fail)
            found[str(generation)] = found.get(str(generation), 0) + 1
        except Exception as error:  # noqa: BLE001  the test shows all of them
            failures.append(f"{scenario}, change {point} ({changes[point - 1]}): {type(error).__name__}: {error}")
    seconds = round(time.monotonic() - start, 2)
    return {"scenario": scenario, "changes": changes, "found": found, "failures": failures, "seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The results do not depend on a disk, and syncing a disk is slow.
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as temporary:
        for selected in sys.argv[2:] or SCENARIOS:
            print(json.dumps(run(selected, Path(temporary) / "work", sys.argv[1] == "fail")), flush=True)
