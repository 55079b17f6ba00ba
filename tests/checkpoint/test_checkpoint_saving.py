"""Saving checkpoints: on ranks, into existing directories, and atomically under crashes."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

from oslo_models.checkpoint import atomic_commit as staging
from oslo_models.checkpoint import open_checkpoint, save_checkpoint, verify_checkpoint
from oslo_models.checkpoint import serialization as streams
from oslo_models.checkpoint.serialization import write_safetensors
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.sharding.layout import EvenSplit, Layout

from support import ROOT, checkpoint_faults
from support.checkpoints import ALONE, MANIFEST, TIED, assert_holds, hidden, model, save, save_on_ranks, tiny_gpt2
from support.pool import Pool


@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
def test_merged_files_equal_the_files_of_transformers(tmp_path: Path, max_shard_size: str) -> None:
    reference = tiny_gpt2()
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    state = reference.state_dict()
    cut = {name: Layout(tuple(tensor.shape)) for name, tensor in state.items()}
    tied = {"lm_head.weight": "transformer.wte.weight"}
    for safe in (None, False):
        save_checkpoint(
            tmp_path / "ours",
            state,
            cut,
            ParallelMesh(),
            merging=True,
            tied=tied,
            files=reference.config.save_pretrained,
            max_shard_size=max_shard_size,
            safe_serialization=safe,
        )
        if safe is None:
            names = [path.name for path in (tmp_path / "theirs").glob("*model*")]
            assert len(names) == (1 if max_shard_size == "1GB" else 5), names
            for name in names:
                assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
        loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        for name, tensor in state.items():
            assert torch.equal(loaded.state_dict()[name], tensor)


def test_tied_tensors_share_memory_in_bin_files(tmp_path: Path) -> None:
    for how in ("split", "merged"):
        save(how, tmp_path / how, safe_serialization=False)
        state = torch.load(next((tmp_path / how).glob("*.bin")))
        assert state["head.weight"].data_ptr() == state["wte.weight"].data_ptr()
    tensors, cut = model()
    untied = {**tensors, "head.weight": tensors["head.weight"] + 1}
    save_checkpoint(tmp_path / "untied", untied, cut, ParallelMesh(), merging=True, tied=TIED)
    assert_holds(open_checkpoint(tmp_path / "untied"), untied)


def test_save_function_writes_bin_files(tmp_path: Path) -> None:
    calls = []

    def save_function(state: dict[str, Tensor], path: Path) -> None:
        calls.append(Path(path).name)
        torch.save(state, path)

    for how in ("split", "merged"):
        save(how, tmp_path / how, save_function=save_function, safe_serialization=False)
        assert_holds(open_checkpoint(tmp_path / how), model()[0])
    assert calls == ["pytorch_model_tp=0_pp=0.bin", "pytorch_model.bin"]


@pytest.mark.parametrize(("world", "tp", "pp"), [(4, 4, 1), (4, 2, 2), (3, 3, 1), (2, 1, 1), (2, 1, 2)])
def test_checkpoint_saved_by_ranks_is_read_by_one_process(
    tmp_path: Path, pool: Pool, world: int, tp: int, pp: int
) -> None:
    expected = model()[0]
    tied = frozenset(TIED)
    for safe in (None, True):
        pool.run(world, save_on_ranks, "split", tmp_path / "split", tp, pp, {"safe_serialization": safe})
        suffix = "safetensors" if safe else "bin"
        names = {f"pytorch_model_tp={t}_pp={p}.{suffix}" for t in range(tp) for p in range(pp)}
        assert {path.name for path in (tmp_path / "split").iterdir()} == {*names, "config.json", MANIFEST}
        reader = open_checkpoint(tmp_path / "split")
        assert reader.split == (tp, pp)
        verify_checkpoint(reader, ALONE)
        assert_holds(reader, expected, tied if safe and pp == 1 else frozenset())
    save("merged", tmp_path / "alone")
    pool.run(world, save_on_ranks, "merged", tmp_path / "merged", tp, pp)
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (tmp_path / "alone/model.safetensors").read_bytes()
    options = {"safe_serialization": False, "max_shard_size": 100}
    pool.run(world, save_on_ranks, "merged", tmp_path / "merged", tp, pp, options)
    assert_holds(open_checkpoint(tmp_path / "merged"), expected)
    assert not hidden(tmp_path)


def save_fsdp(directory: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = ParallelMesh()
    module = torch.nn.Linear(5, 7)
    with torch.no_grad():
        module.weight.copy_(torch.arange(35.0).reshape(7, 5))
    fully_shard(module, mesh=mesh.device_mesh["dp"])
    tensors = module.state_dict()
    cut = {name: Layout(tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name in ("split", "merged"):
        save_checkpoint(directory / name, tensors, cut, mesh, merging=name == "merged", tied={})


def test_fsdp_tensors_are_saved_in_full(tmp_path: Path, pool: Pool) -> None:
    pool.run(2, save_fsdp, tmp_path)
    for name in ("split", "merged"):
        weight = open_checkpoint(tmp_path / name).read("weight", Layout((7, 5)), 0)
        assert torch.equal(weight, torch.arange(35.0).reshape(7, 5))


def merged_peak(directory: Path) -> float:
    """Growth of this rank's memory during a merged save, in largest tensors."""
    mesh = ParallelMesh(2)
    cut = {
        f"{dim}.{i}": Layout.sharded((4096, 4096), dim, (EvenSplit((4096, 4096)[dim]),), 2)
        for dim in (0, 1)
        for i in (0, 1)
    }
    tensors = {name: torch.ones(layout.local_shape(mesh.tp.rank)) for name, layout in cut.items()}
    save_checkpoint(directory, {"0.0": tensors["0.0"]}, cut, mesh, merging=True, tied={})

    def status(key: str) -> int:
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")
    start = status("VmRSS")
    save_checkpoint(directory, tensors, cut, mesh, merging=True, tied={})
    return (status("VmHWM") - start) * 1024 / (4096 * 4096 * 4)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's accounting of memory")
def test_merging_needs_memory_for_one_tensor(tmp_path: Path, pool: Pool) -> None:
    first, second = pool.run(2, merged_peak, tmp_path)
    assert first < 1.6, "a full tensor and a block of 8 MB, which here is an eighth of it"
    assert second < 0.6


def test_save_replaces_the_old_checkpoint_and_keeps_other_files(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o750)
    link.symlink_to("real")
    (real / "tokenizer.json").write_text("mine")
    (real / "model.fp16.safetensors").write_text("another variant")
    for name in ("pytorch_model.bin", "pytorch_model_tp=5_pp=0.bin", "model-00001-of-00002.safetensors"):
        (real / name).write_text("old")
    save("split", link)
    kept = {"tokenizer.json", "model.fp16.safetensors", "config.json", MANIFEST, "pytorch_model_tp=0_pp=0.bin"}
    assert link.is_symlink() and {path.name for path in real.iterdir()} == kept
    assert (real / "tokenizer.json").read_text() == "mine" and real.stat().st_mode & 0o777 == 0o750
    (real / "runs").mkdir()
    log = open(real / "runs" / "log", "w")  # noqa: SIM115
    before = real.stat().st_ino
    save("merged", real)
    assert real.stat().st_ino == before, "with folders in it the directory stays the same one"
    assert {path.name for path in real.glob("*model*")} == {"model.safetensors", "model.fp16.safetensors"}
    log.write("still here")
    log.close()
    assert (real / "runs" / "log").read_text() == "still here" and not hidden(tmp_path)


def test_save_into_the_working_directory_keeps_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for how in ("split", "merged"):
        save(how, Path("."))
        assert Path.cwd() == tmp_path and Path("config.json").exists() and not list(Path.cwd().glob(".*"))
        open_checkpoint(".").close()


def test_save_syncs_everything_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    fsync, exchange = os.fsync, staging._rename_exchange

    def record_fsync(fd: int) -> None:
        fsync(fd)
        events.append(("sync", os.fstat(fd).st_ino))

    def record_exchange(a: Path, b: Path) -> None:
        exchange(a, b)
        events.append(("exchange", 0))

    save("merged", tmp_path / "x")
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(staging, "_rename_exchange", record_exchange)
    save("merged", tmp_path / "x", max_shard_size=100, generation=1)
    at = events.index(("exchange", 0))
    before, after = ({inode for _, inode in part} for part in (events[:at], events[at:]))
    assert {path.stat().st_ino for path in [tmp_path / "x", *(tmp_path / "x").iterdir()]} <= before
    assert tmp_path.stat().st_ino in after


@pytest.mark.parametrize("how", ["split", "merged", "bin"])
def test_full_disk_raises_and_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    kwargs = {"safe_serialization": False} if how == "bin" else {}
    kind = "split" if how == "split" else "merged"
    save("split", tmp_path / "x")
    usage = SimpleNamespace(total=10**6, free=100)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(OSError, match=r"\d+ bytes are needed, 100 are free") as caught:
            save(kind, tmp_path / "x", generation=1, **kwargs)
        assert caught.value.errno == errno.ENOSPC

        def fails_late(*_: Any) -> None:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

        usage.free = 10**6
        patch.setattr(torch, "save", fails_late)
        patch.setattr(streams, "tensor_bytes", lambda tensor: usage.__setattr__("free", 0) or fails_late())
        with pytest.raises(OSError, match=r"rank 0 could not write .*/\.x\.saving-.*, \d+ are free: .*unexpected pos"):
            save(kind, tmp_path / "x", generation=1, **kwargs)
    assert not hidden(tmp_path)
    assert_holds(open_checkpoint(tmp_path / "x"), model()[0])


def test_save_rejects_bad_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        save("split", tmp_path / "file")
    with pytest.raises(OSError, match="file"):
        save("split", tmp_path / "file" / "below")
    save("split", tmp_path / "x")
    access = os.access
    with monkeypatch.context() as patch:  # root may do anything, so permissions are played
        patch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "x" and access(path, mode))
        with pytest.raises(PermissionError, match="no permission"):
            save("split", tmp_path / "x", generation=1)
    assert_holds(open_checkpoint(tmp_path / "x"), model()[0])
    with monkeypatch.context() as patch:  # the parent may not be written: the target is changed in place
        patch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode))
        save("merged", tmp_path / "x", generation=1)
    assert_holds(open_checkpoint(tmp_path / "x"), model(generation=1)[0], frozenset(TIED))
    tensors, cut = model()
    with pytest.raises(ValueError, match=r"h\.1\.up has shape \(12, 3\)"):
        save_checkpoint(
            tmp_path / "x", {"h.1.up": tensors["h.1.up"][:, :3]}, cut, ParallelMesh(), merging=False, tied={}
        )
    assert not hidden(tmp_path)


def test_tensors_of_several_dtypes_are_in_the_order_of_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.int64, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.uint8)
    tensors = {f"{name} {dtype}": torch.ones(3, dtype=dtype) for name in "ab" for dtype in dtypes}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours", tensors, (tensors[name] for name in streams.write_order(tensors)))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def save_and_fail(how: str, directory: Path, bad_rank: int, files: str) -> None:
    """Save a checkpoint while writing fails on one rank."""
    mesh = ParallelMesh(2)

    def bad(*_: Any) -> None:
        raise OSError(errno.EDQUOT, "quota exceeded")

    if mesh.world.rank == bad_rank and not files:
        streams.write_safetensors = bad
    try:
        write = (lambda folder: (folder / "missing" / "config.json").write_text("")) if files else None
        save(how, directory, mesh, 1, files=write, safe_serialization=True)
    finally:
        streams.write_safetensors = write_safetensors


@pytest.mark.parametrize(("how", "bad_rank", "files"), [("split", 1, ""), ("merged", 0, ""), ("split", 0, "bad")])
def test_save_failure_on_one_rank_is_raised_on_all(
    tmp_path: Path, pool: Pool, how: str, bad_rank: int, files: str
) -> None:
    pool.run(2, save_on_ranks, "split", tmp_path / "x", 2)
    errors = pool.run(2, save_and_fail, how, tmp_path / "x", bad_rank, files, expect=OSError)
    assert f"rank {bad_rank}" in str(errors[1 - bad_rank])
    assert files or all("quota exceeded" in str(error) for error in errors)
    assert not hidden(tmp_path)
    assert_holds(open_checkpoint(tmp_path / "x"), model()[0])


def test_cleanup_keeps_the_staging_directories_of_live_saves(tmp_path: Path) -> None:
    mesh = ParallelMesh()
    (tmp_path / ".x.saving-dead").mkdir()
    with staging.replace_atomically(tmp_path / "x", mesh.world, 0) as alive:
        assert not (tmp_path / ".x.saving-dead").exists()
        save("split", tmp_path / "x")
        assert alive.is_dir()
        (alive / MANIFEST).write_bytes((tmp_path / "x" / MANIFEST).read_bytes())


FAILING = ["fresh merged bin", "sharded over split"]


@pytest.mark.parametrize(
    ("disturbance", "drawn"), [("kill", 3), pytest.param("kill", None, marks=pytest.mark.zoo), ("fail", 1)]
)
def test_save_survives_a_crash_at_every_file_system_call(disturbance: str, drawn: int | None, seed: int) -> None:
    """Kill or fail the save at every file-system change: the old or the new checkpoint remains complete."""
    if sys.platform != "linux":
        pytest.skip("needs Linux's ptrace")
    script = ROOT / "tests" / "support" / "checkpoint_faults.py"
    both = "two ranks, second killed"
    # Failures need fewer scenarios: one function cleans up after all of them.
    others = sorted(checkpoint_faults.SCENARIOS.keys() - {both}) if disturbance == "kill" else FAILING
    scenarios = [] if drawn is None else [*random.Random(seed).sample(others, drawn), both]
    command = [sys.executable, str(script), disturbance, *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace is not permitted here" in done.stderr:
        pytest.skip("ptrace is not permitted here")
    assert done.returncode == 0, done.stderr
    tables = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [failure for table in tables for failure in table["failures"]]
    points = [change for table in tables for change in table["changes"]]
    assert {"write", "fsync", "mkdir"} <= {*points}
    assert drawn is not None or "renameat2" in points
    assert len(points) >= (200 if drawn is None else 25)
    one_sided = [table["scenario"] for table in tables if len(table["found"]) == 1]
    assert one_sided == [both], "every other scenario has points before and after its commit"
