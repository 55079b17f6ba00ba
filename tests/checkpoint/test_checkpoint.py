"""Reading checkpoints: every bit is restored at any parallel sizes, and damage is found."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2LMHeadModel, LlamaForCausalLM, LlamaModel

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError, open_checkpoint, save_checkpoint, verify_checkpoint
from oslo_models.checkpoint import weights_file as weights
from oslo_models.checkpoint.manifest import sync_and_record, write_manifest
from oslo_models.checkpoint.serialization import write_safetensors
from oslo_models.cli.main import inspect_checkpoint
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.sharding.layout import Layout

from support import zoo
from support.checkpoints import (
    ALONE,
    MANIFEST,
    TIED,
    assert_holds,
    model,
    open_and_verify,
    save,
    save_on_ranks,
    tiny_gpt2,
    with_full_stage_outputs,
)
from support.layouts import distinct, layouts
from support.pool import Pool

# ---- reading


@given(st.data(), st.sampled_from(["bin", "safetensors"]))
@settings(max_examples=60)
def test_any_layout_reads_from_any_saved_layout(data: st.DataObject, suffix: str) -> None:
    # beside another dimension, a manifest holds one range of dimension 0; adapters with several are saved whole
    saved, saved_ranks = data.draw(layouts().filter(lambda case: all(len(own) == 1 for own in case[0].first_ranges)))
    wanted, wanted_ranks = data.draw(layouts().filter(lambda case: case[0].dim is None or case[0].shape == saved.shape))
    if wanted.dim is None:
        wanted = Layout(saved.shape)
    full = distinct(saved.shape)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        records = {}
        for rank in range(saved_ranks):
            path = folder / f"pytorch_model_tp={rank}_pp=0.{suffix}"
            part = saved.shard(full, rank).contiguous()
            if suffix == "bin":
                torch.save({"x": part.clone()}, path)
            else:
                write_safetensors(path, {"x": part}, iter([part]))
            records[path.name] = sync_and_record(path)
        entry = {"shape": saved.shape, "dtype": "float64", "dim": saved.dim, "ranges": saved.ranges, "stages": [0]}
        if saved.first_ranges:
            entry["first_ranges"] = [own for (own,) in saved.first_ranges]
        content = {"tp": saved_ranks, "pp": 1, "variant": None, "files": records, "tensors": {"x": entry}}
        write_manifest(folder / MANIFEST, content)
        reader = open_checkpoint(folder)
        for rank in range(wanted_ranks):
            assert torch.equal(reader.read("x", wanted, rank), wanted.shard(full, rank))
        reader.close()


TYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
TYPES += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
TYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.stacks
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("how", ["split", "merged"])
def test_save_keeps_every_dtype_and_shape(tmp_path: Path, how: str, safe: bool) -> None:
    tensors = {str(dtype): torch.arange(24).reshape(4, 6).to(dtype) for dtype in TYPES}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "strided": torch.randn(6, 4).T}
    tensors["view"] = torch.randn(100, 100)[3]
    cut = {name: Layout(tuple(tensor.shape)) for name, tensor in tensors.items()}
    save_checkpoint(tmp_path, tensors, cut, ParallelMesh(), merging=how == "merged", tied={}, safe_serialization=safe)
    reader = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        read = reader.read(name, cut[name], 0)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8))
    assert sum(path.stat().st_size for path in tmp_path.glob("*model*")) < 20_000, (
        "a view was saved with all its storage"
    )


def test_open_prefers_files_in_the_order_of_transformers(tmp_path: Path) -> None:
    names = ["pytorch_model.bin.index.json", "pytorch_model.bin", "model.safetensors.index.json", "model.safetensors"]
    for generation, name in enumerate(names):
        how = {"safe_serialization": "safetensors" in name, "max_shard_size": 100 if "index" in name else "1GB"}
        save("merged", tmp_path / "new", generation=generation, **how)
        (tmp_path / "new" / MANIFEST).unlink()
        shutil.copytree(tmp_path / "new", tmp_path / "all", dirs_exist_ok=True)
        assert (tmp_path / "all" / name).exists()
        without = frozenset() if "bin" in name else frozenset(TIED)
        assert_holds(open_checkpoint(tmp_path / "all"), model(generation=generation)[0], without)
        shutil.rmtree(tmp_path / "new")
    save("merged", tmp_path / "all", generation=7, variant="fp16")
    assert_holds(open_checkpoint(tmp_path / "all", variant="fp16"), model(generation=7)[0], frozenset(TIED))
    assert_holds(open_checkpoint(tmp_path / "all"), model(generation=3)[0], frozenset(TIED))
    with pytest.raises(FileNotFoundError, match=r"model\.int8\.safetensors"):
        open_checkpoint(tmp_path / "all", variant="int8")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_checkpoint(tmp_path / "nowhere")


def test_open_names_missing_shards(tmp_path: Path) -> None:
    save("merged", tmp_path, max_shard_size=100)
    (tmp_path / MANIFEST).unlink()
    shard = sorted(tmp_path.glob("model-00002-of-*"))[0]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_transformers_loads_from_a_slice_reader(tmp_path: Path) -> None:
    reference = tiny_gpt2()
    reference.save_pretrained(tmp_path)
    reader = open_checkpoint(tmp_path)
    slices = {name: reader.slice(name, Layout(info.shape), 0) for name, info in reader.tensors.items()}
    part = slices["transformer.wte.weight"]
    assert (part.get_shape(), part.get_dtype(), part.shape, part.dtype) == ([61, 16], "F32", (61, 16), torch.float32)
    loaded = GPT2LMHeadModel.from_pretrained(None, config=reference.config, state_dict=slices)
    for name, tensor in reference.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    first = part[...]
    first.zero_()
    assert torch.equal(part[...], reference.transformer.wte.weight), "what was read is not the reader's"


@pytest.mark.stacks
def test_concurrent_reads_while_pages_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_BLOCK", 500)
    for how in ("split", "merged"):
        save(how, tmp_path / how)
        reader = open_checkpoint(tmp_path / how)
        with ThreadPoolExecutor(4) as executor:
            jobs = [
                executor.submit(assert_holds, reader, model()[0], frozenset(TIED) - reader.tensors.keys())
                for _ in range(8)
            ]
            for job in jobs:
                job.result()


def test_reader_sees_one_generation_while_others_are_saved(tmp_path: Path) -> None:
    save("split", tmp_path / "x")
    before = open_checkpoint(tmp_path / "x")
    stop = threading.Event()

    def keep_saving() -> None:
        generation = 0
        while not stop.is_set():
            generation += 1
            save(("split", "merged")[generation % 2], tmp_path / "x", generation=generation, metadata={"n": generation})

    thread = threading.Thread(target=keep_saving)
    thread.start()
    seen = set()
    try:
        while len(seen) < 20:
            reader = open_checkpoint(tmp_path / "x")
            verify_checkpoint(reader, ALONE)
            assert reader.manifest is not None
            seen.add(reader.manifest.get("n", 0))
            expected, cut = model(generation=reader.manifest.get("n", 0))
            for name in reader.tensors:
                assert torch.equal(reader.read(name, cut[name], 0), expected[name])
            reader.close()
    finally:
        stop.set()
        thread.join()
    assert_holds(before, model()[0])


def test_inspect_checkpoint_describes_its_files(tmp_path: Path) -> None:
    save("split", tmp_path / "split", metadata={"model_type": "tiny"})
    found = inspect_checkpoint(tmp_path / "split")
    assert json.loads(json.dumps(found)) == {**found, "split": [1, 1]}
    (name,) = found["files"]
    assert found["manifest"]["model_type"] == "tiny" and found["manifest"]["dtype"] == "float32"
    assert found["files"][name]["tensors"]["h.1.up"] == {"dtype": "torch.bfloat16", "shape": [12, 4]}
    assert (found["files"][name]["tp"], found["files"][name]["pp"]) == (0, 0)
    save("merged", tmp_path / "merged")
    assert inspect_checkpoint(tmp_path / "merged")["split"] is None


MEMORY = """
import sys, torch
from oslo_models.checkpoint import open_checkpoint, save_checkpoint, verify_checkpoint
from oslo_models.sharding.layout import Layout, EvenSplit
from oslo_models.distributed.mesh import ParallelMesh
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
def watch():
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
    return status("VmRSS")
mesh, folder = ParallelMesh(), sys.argv[1]
names = ["wte"] + [f"{kind}.{i}" for i in range(9) for kind in ("up", "down")]
tensors = {name: torch.randn({"w": (5000, 1000), "u": (4000, 600), "d": (600, 4000)}[name[0]]) for name in names}
cut = {name: Layout(tuple(t.shape)) for name, t in tensors.items()}
total, largest = sum(t.nbytes for t in tensors.values()), max(t.nbytes for t in tensors.values())
saves = {"split": (False, None), "safe": (False, True), "bin": (True, False), "merged": (True, None)}
for how, (merging, safe) in saves.items():
    used = []  # pages of libraries that are read for the first time, or again, count too: the least of three is ours
    while len(used) < 3 and min(used, default=9) > 1.3:
        start = watch()
        save_checkpoint(f"{folder}/{how}", tensors, cut, mesh, merging=merging, tied={}, safe_serialization=safe)
        used.append((status("VmHWM") - start) / largest)
    print("saving", how, min(used), 1.3)
del tensors
for how in saves:
    start = watch()
    reader = open_checkpoint(f"{folder}/{how}")
    verify_checkpoint(reader, mesh.world)
    kept = []
    for name, info in reader.tensors.items():
        dim = int(name.startswith("down"))
        kept.append(reader.read(name, Layout.sharded(info.shape, dim, (EvenSplit(info.shape[dim]),), 2), 1))
    print("reading", how, (status("VmHWM") - start) / total, (total / 2 + largest) / total + 0.01)
    reader.close()
    del kept, reader
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's accounting of memory")
def test_reading_a_shard_needs_memory_for_the_shard(tmp_path: Path) -> None:
    """Reading half of a checkpoint needs that half and at most the largest tensor; saving, one tensor."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], env=environment, check=True, capture_output=True, text=True
    ).stdout
    lines = [line.split() for line in output.splitlines()]
    assert len(lines) == 8
    for doing, how, used, allowed in lines:
        assert float(used) <= float(allowed), (doing, how, used, allowed)


# ---- files of the original library, which say nothing of themselves


def old_layout(name: str, shapes: list[tuple[int, ...]]) -> Layout:
    tensors, cut = model(len(shapes))
    whole = tuple(tensors[name].shape)
    return Layout(whole) if all(shape == whole for shape in shapes) and len(shapes) > 1 else cut[name]


def write_old(folder: Path, tp: int, pp: int, spelling: str = "=", **kwargs: Any) -> dict[str, Tensor]:
    """Write files of OSLO 1: every stage's file holds all layers, and layers of other stages are stale."""
    tensors, cut = model(tp)
    for t in range(tp):
        for p in range(pp):
            state = {name: cut[name].shard(tensor, t).clone() for name, tensor in tensors.items()}
            for name in state:
                if with_full_stage_outputs(name, pp) != p:
                    state[name] = torch.full_like(state[name], -1)
            torch.save(state, folder / f"pytorch_model_tp{spelling}{t}_pp{spelling}{p}.bin", **kwargs)
    return tensors


@pytest.mark.parametrize(
    ("tp", "pp", "spelling", "zip_file"), [(1, 1, "=", True), (2, 2, "=", True), (3, 1, "_", True), (2, 1, "=", False)]
)
def test_oslo_1_files_are_read_with_a_fallback_layout(
    tmp_path: Path, tp: int, pp: int, spelling: str, zip_file: bool
) -> None:
    expected = write_old(tmp_path, tp, pp, spelling, _use_new_zipfile_serialization=zip_file)
    reader = open_checkpoint(tmp_path, fallback_layout=old_layout, owner_stage=with_full_stage_outputs)
    assert (reader.split, reader.manifest) == ((tp, pp), None)
    verify_checkpoint(reader, ALONE)
    assert_holds(reader, expected)


def test_oslo_1_files_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    write_old(tmp_path, 2, 2)
    with pytest.raises(ValueError, match="fallback_layout"):
        open_checkpoint(tmp_path)
    torch.save({"wte.weight": torch.zeros(1, 4)}, tmp_path / "pytorch_model_tp=1_pp=0.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model_tp=1_pp=0\.bin"):
        open_checkpoint(tmp_path, fallback_layout=lambda name, shapes: model(2)[1][name])
    (tmp_path / "pytorch_model_tp=1_pp=0.bin").unlink()
    save("merged", tmp_path / "merged")
    shutil.copy(tmp_path / "merged" / "model.safetensors", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"2 x 2 grid .* tp=1 pp=0 are missing"):
        open_checkpoint(tmp_path, fallback_layout=old_layout)


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def test_unpickling_a_checkpoint_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Attack()}, protocol=2))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "attacked").exists()


# ---- damage


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["split", "merged", "bin"])
def test_verify_finds_every_flipped_bit(tmp_path: Path, how: str) -> None:
    save("split" if how == "split" else "merged", tmp_path, safe_serialization=False if how == "bin" else None)
    (path,) = tmp_path.glob("*model*")
    for position in range(0, path.stat().st_size, 97):
        flip(path, position)
        with pytest.raises(CheckpointError, match=path.name):
            verify_checkpoint(open_checkpoint(tmp_path), ALONE)
        flip(path, position)
    verify_checkpoint(open_checkpoint(tmp_path), ALONE)
    for position in range(0, (tmp_path / MANIFEST).stat().st_size, 97):
        flip(tmp_path / MANIFEST, position)
        with pytest.raises(CheckpointError, match=MANIFEST):
            verify_checkpoint(open_checkpoint(tmp_path), ALONE)
        flip(tmp_path / MANIFEST, position)


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_empty(path: Path) -> None:
    os.truncate(path, 0)


def damage_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_extra(path: Path) -> None:
    shutil.copy(path, path.with_name(path.name.replace("tp=1", "tp=2")))


def damage_other_generation(path: Path) -> None:
    torch.save({name: tensor + 1 for name, tensor in torch.load(path).items()}, path)


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_empty, damage_garbage, damage_missing, damage_extra, damage_other_generation],
)
def test_open_names_damage_on_every_rank(tmp_path: Path, pool: Pool, damage: Callable[[Path], None]) -> None:
    pool.run(2, save_on_ranks, "split", tmp_path, 2)
    path = tmp_path / "pytorch_model_tp=1_pp=0.bin"
    damage(path)
    named = path.name.replace("tp=1", "tp=2") if damage is damage_extra else path.name
    for error in pool.run(2, open_and_verify, tmp_path, expect=CheckpointError):
        assert named in str(error) and "expected" in str(error) and "found" in str(error), error
    if damage in (damage_truncate, damage_empty, damage_garbage):
        (tmp_path / MANIFEST).unlink()
        with pytest.raises(CheckpointError, match=path.name):
            open_checkpoint(tmp_path, fallback_layout=old_layout)


def test_file_that_is_shortened_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """The reader raises, instead of a bus error that ends the process."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(4096.0).view(64, 64)}, path)
    file = weights.WeightsFile(path)
    view, out = file.views["weight"], torch.empty(64, 64)
    file.copy(view, out)
    assert torch.equal(out, view)
    os.truncate(path, path.stat().st_size - 64 * 64 * 4)
    with pytest.raises(CheckpointError, match=rf"{path.name} had \d+ bytes .* ends at"):
        file.copy(view, out)


def test_later_format_versions_are_rejected(tmp_path: Path) -> None:
    save("split", tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "format_version": 4}))
    with pytest.raises(CheckpointError, match=r"format version 4 .* reads versions 1 to 3"):
        open_checkpoint(tmp_path)


def check_random_state(path: Path, name: str, draws: bool) -> None:
    cls: Any = registry.find(name)
    for tp, pp in ((2, 1), (1, 2)):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        cls.from_pretrained_with_parallel(path, tp, pp)
        assert torch.equal(torch.get_rng_state(), before) != draws, (tp, pp)


def test_loading_a_complete_checkpoint_draws_no_random_numbers(pool: Pool, tmp_path: Path) -> None:
    """A script that seeds and loads then draws the same adapters as with transformers. Missing weights are drawn."""
    LlamaForCausalLM(zoo.config("llama-untied")).save_pretrained(tmp_path / "complete")
    LlamaModel(zoo.config("llama-untied")).save_pretrained(tmp_path / "headless")
    for folder, draws in (("complete", False), ("headless", True)):
        pool.run(2, check_random_state, tmp_path / folder, "LlamaForCausalLM", draws)
