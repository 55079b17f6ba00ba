"""Checkpoints: what is saved comes back bit for bit at any sizes, damage is found, and no crash loses the old one."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from test_layout import distinct, layouts
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from oslo_models.checkpoint import (
    CheckpointError,
    CheckpointReader,
    merging,
    open_checkpoint,
    save_checkpoint,
    staging,
    streams,
    verify_checkpoint,
    weights,
)
from oslo_models.checkpoint.manifest import seal, write_manifest
from oslo_models.checkpoint.streams import write_safetensors
from oslo_models.cli import inspect_checkpoint
from oslo_models.layout import GroupedHeads, Layout, Units
from oslo_models.mesh import Axis, ParallelMesh

HEADS = GroupedHeads(6, 2, 2)
ALONE = Axis("world", 0, (0,), None)
MANIFEST = "oslo_manifest.json"


def model(tp: int = 1, generation: int = 0) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """Full tensors of a small model, and how they divide over ``tp`` ranks."""
    generator = torch.Generator().manual_seed(generation)
    divisions: dict[str, Any] = {
        "wte.weight": ((11, 4), 0, (Units(11),)),
        "h.0.qkv": ((4, 20), 1, (HEADS.query, HEADS.key_value, HEADS.key_value)),
        "h.0.norm": ((4,), None, ()),
        "h.0.scale": ((), None, ()),
        "h.1.up": ((12, 4), 0, (Units(12),)),
        "h.1.down": ((4, 12), 1, (Units(12),)),
        "head.weight": ((11, 4), 0, (Units(11),)),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, (shape, _, _) in divisions.items()}
    tensors["h.1.up"] = tensors["h.1.up"].bfloat16()
    tensors["head.weight"] = tensors["wte.weight"]
    cut = {
        name: Layout(shape) if dim is None else Layout.divided(shape, dim, splits, tp)
        for name, (shape, dim, splits) in divisions.items()
    }
    return tensors, cut


TIED = {"head.weight": "wte.weight"}


def on_stage(name: str, pp: int) -> int:
    return 0 if pp == 1 or name.startswith(("wte", "h.0")) else pp - 1


def local(mesh: ParallelMesh, generation: int = 0) -> tuple[dict[str, Tensor], dict[str, Layout]]:
    """What a rank of the mesh holds of the model."""
    tensors, cut = model(mesh.tp.size, generation)
    mine = [name for name in tensors if on_stage(name, mesh.pp.size) == mesh.pp.rank]
    parts = {name: cut[name].shard(tensors[name], mesh.tp.rank).clone() for name in mine}
    if len(parts.keys() & {"wte.weight", "head.weight"}) == 2:
        parts["head.weight"] = parts["wte.weight"]
    return parts, {name: cut[name] for name in mine}


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def save(how: str, directory: Path, mesh: ParallelMesh | None = None, generation: int = 0, **kwargs: Any) -> None:
    mesh = mesh or ParallelMesh()
    kwargs = {"tied": TIED, "files": write_config, **kwargs}
    save_checkpoint(directory, *local(mesh, generation), mesh, merging=how == "merged", **kwargs)


def assert_holds(
    reader: CheckpointReader, expected: Mapping[str, Tensor], without: frozenset[str] = frozenset()
) -> None:
    assert reader.tensors.keys() == expected.keys() - without
    for name, info in reader.tensors.items():
        assert (info.shape, info.dtype) == (tuple(expected[name].shape), expected[name].dtype)
        for tp in (1, 2, 3):
            layout = model(tp)[1][name]
            for rank in range(tp):
                part = reader.read(name, layout, rank)
                assert part.dtype == info.dtype and torch.equal(part, layout.shard(expected[name], rank)), (
                    name,
                    tp,
                    rank,
                )


def hidden(folder: Path) -> list[Path]:
    return [*folder.glob(".*"), *folder.glob("*/.*")]


# ---- reading


@given(st.data(), st.sampled_from(["bin", "safetensors"]))
@settings(max_examples=60)
def test_any_division_reads_from_any_division(data: st.DataObject, suffix: str) -> None:
    saved, saved_ranks = data.draw(layouts())
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
            records[path.name] = seal(path)
        entry = {"shape": saved.shape, "dtype": "float64", "dim": saved.dim, "ranges": saved.ranges, "stages": [0]}
        content = {"tp": saved_ranks, "pp": 1, "variant": None, "files": records, "tensors": {"x": entry}}
        write_manifest(folder / MANIFEST, content)
        reader = open_checkpoint(folder)
        for rank in range(wanted_ranks):
            assert torch.equal(reader.read("x", wanted, rank), wanted.shard(full, rank))
        reader.close()


TYPES = [torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
TYPES += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
TYPES += [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("how", ["split", "merged"])
def test_every_type_and_shape_survives(tmp_path: Path, how: str, safe: bool) -> None:
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


def test_files_are_preferred_as_transformers_does(tmp_path: Path) -> None:
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


def test_missing_shards_are_named(tmp_path: Path) -> None:
    save("merged", tmp_path, max_shard_size=100)
    (tmp_path / MANIFEST).unlink()
    shard = sorted(tmp_path.glob("model-00002-of-*"))[0]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


def test_transformers_loads_from_slices(tmp_path: Path) -> None:
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


def test_threads_read_while_pages_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_reader_sees_one_generation_whole_while_others_are_saved(tmp_path: Path) -> None:
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


def test_inspect(tmp_path: Path) -> None:
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
from oslo_models.layout import Layout, Units
from oslo_models.mesh import ParallelMesh
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
    start = watch()
    save_checkpoint(f"{folder}/{how}", tensors, cut, mesh, merging=merging, tied={}, safe_serialization=safe)
    print("saving", how, (status("VmHWM") - start) / largest, 1.3)
del tensors
for how in saves:
    start = watch()
    reader = open_checkpoint(f"{folder}/{how}")
    verify_checkpoint(reader, mesh.world)
    kept = []
    for name, info in reader.tensors.items():
        dim = int(name.startswith("down"))
        kept.append(reader.read(name, Layout.divided(info.shape, dim, (Units(info.shape[dim]),), 2), 1))
    print("reading", how, (status("VmHWM") - start) / total, (total / 2 + largest) / total + 0.01)
    reader.close()
    del kept, reader
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux's accounting of memory")
def test_memory_stays_within_the_share(tmp_path: Path) -> None:
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
    """Every stage's file holds every layer, and those of other stages are stale."""
    tensors, cut = model(tp)
    for t in range(tp):
        for p in range(pp):
            state = {name: cut[name].shard(tensor, t).clone() for name, tensor in tensors.items()}
            for name in state:
                if on_stage(name, pp) != p:
                    state[name] = torch.full_like(state[name], -1)
            torch.save(state, folder / f"pytorch_model_tp{spelling}{t}_pp{spelling}{p}.bin", **kwargs)
    return tensors


@pytest.mark.parametrize(
    ("tp", "pp", "spelling", "zip_file"), [(1, 1, "=", True), (2, 2, "=", True), (3, 1, "_", True), (2, 1, "=", False)]
)
def test_files_without_manifest(tmp_path: Path, tp: int, pp: int, spelling: str, zip_file: bool) -> None:
    expected = write_old(tmp_path, tp, pp, spelling, _use_new_zipfile_serialization=zip_file)
    reader = open_checkpoint(tmp_path, fallback_layout=old_layout, owner_stage=on_stage)
    assert (reader.split, reader.manifest) == ((tp, pp), None)
    verify_checkpoint(reader, ALONE)
    assert_holds(reader, expected)


def test_old_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
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


def test_pickles_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_every_flipped_bit_is_found(tmp_path: Path, how: str) -> None:
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
def test_damage_is_named_on_every_rank(tmp_path: Path, pool: Pool, damage: Callable[[Path], None]) -> None:
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


def test_later_formats_are_refused(tmp_path: Path) -> None:
    save("split", tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(CheckpointError, match="format version 2"):
        open_checkpoint(tmp_path)


# ---- saving


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2))


@pytest.mark.parametrize("max_shard_size", ["1GB", "10KB"])
def test_merged_files_are_those_of_transformers(tmp_path: Path, max_shard_size: str) -> None:
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


def save_on_ranks(how: str, directory: Path, tp: int, pp: int = 1, kwargs: dict[str, Any] | None = None) -> None:
    with patch.object(merging, "_BLOCK", 40):  # a row or two, so that tensors travel in several blocks
        save(how, directory, ParallelMesh(tp, pp), **(kwargs or {}))


def open_and_verify(directory: Path) -> None:
    from oslo_models.collectives import agree

    mesh = ParallelMesh()
    with agree(mesh.world, "opening"):
        reader = open_checkpoint(directory)
    verify_checkpoint(reader, mesh.world)


@pytest.mark.parametrize(("world", "tp", "pp"), [(4, 4, 1), (4, 2, 2), (3, 3, 1), (2, 1, 1), (2, 1, 2)])
def test_ranks_save_what_one_process_reads(tmp_path: Path, pool: Pool, world: int, tp: int, pp: int) -> None:
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


def test_fsdp_tensors_are_saved_whole(tmp_path: Path, pool: Pool) -> None:
    pool.run(2, save_fsdp, tmp_path)
    for name in ("split", "merged"):
        weight = open_checkpoint(tmp_path / name).read("weight", Layout((7, 5)), 0)
        assert torch.equal(weight, torch.arange(35.0).reshape(7, 5))


def merged_peak(directory: Path) -> float:
    """Growth of this rank's memory during a merged save, in largest tensors."""
    mesh = ParallelMesh(2)
    cut = {
        f"{dim}.{i}": Layout.divided((4096, 4096), dim, (Units((4096, 4096)[dim]),), 2)
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
def test_merging_needs_one_tensor(tmp_path: Path, pool: Pool) -> None:
    first, second = pool.run(2, merged_peak, tmp_path)
    assert first < 1.6, "a full tensor and a block of 8 MB, which here is an eighth of it"
    assert second < 0.6


def test_other_files_stay_and_the_old_checkpoint_goes(tmp_path: Path) -> None:
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


def test_a_save_into_the_working_directory_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for how in ("split", "merged"):
        save(how, Path("."))
        assert Path.cwd() == tmp_path and Path("config.json").exists() and not list(Path.cwd().glob(".*"))
        open_checkpoint(".").close()


def test_everything_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_full_disk_is_reported_and_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
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
        patch.setattr(streams, "_bytes", lambda tensor: usage.__setattr__("free", 0) or fails_late())
        with pytest.raises(OSError, match=r"rank 0 could not write .*/\.x\.saving-.*, \d+ are free: .*unexpected pos"):
            save(kind, tmp_path / "x", generation=1, **kwargs)
    assert not hidden(tmp_path)
    assert_holds(open_checkpoint(tmp_path / "x"), model()[0])


def test_bad_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def save_and_fail(how: str, directory: Path, bad_rank: int, files: str) -> None:
    """A save in which writing fails on one rank."""
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
def test_failure_on_one_rank_is_raised_on_all(tmp_path: Path, pool: Pool, how: str, bad_rank: int, files: str) -> None:
    pool.run(2, save_on_ranks, "split", tmp_path / "x", 2)
    errors = pool.run(2, save_and_fail, how, tmp_path / "x", bad_rank, files, expect=OSError)
    assert f"rank {bad_rank}" in str(errors[1 - bad_rank])
    assert files or all("quota exceeded" in str(error) for error in errors)
    assert not hidden(tmp_path)
    assert_holds(open_checkpoint(tmp_path / "x"), model()[0])


def test_live_saves_are_not_cleaned_away(tmp_path: Path) -> None:
    mesh = ParallelMesh()
    (tmp_path / ".x.saving-dead").mkdir()
    with staging.replacing(tmp_path / "x", mesh.world, 0) as alive:
        assert not (tmp_path / ".x.saving-dead").exists()
        save("split", tmp_path / "x")
        assert alive.is_dir()
        (alive / MANIFEST).write_bytes((tmp_path / "x" / MANIFEST).read_bytes())


@pytest.mark.parametrize("disturbance", ["kill", "fail"])
def test_crash_table(disturbance: str) -> None:
    """Death, or a failure of the file system, at every single change of it: the old or the new is there, whole."""
    if sys.platform != "linux":
        pytest.skip("needs Linux's ptrace")
    script = Path(__file__).with_name("checkpoint_faults.py")
    # Failures need fewer scenarios: what they leave behind is cleaned up in one place.
    scenarios = ["fresh merged bin", "sharded over split", "two ranks, second killed"] if disturbance == "fail" else []
    command = [sys.executable, str(script), disturbance, *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace is not permitted here" in done.stderr:
        pytest.skip("ptrace is not permitted here")
    assert done.returncode == 0, done.stderr
    tables = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [failure for table in tables for failure in table["failures"]]
    points = [change for table in tables for change in table["changes"]]
    assert {"write", "fsync", "mkdir", "renameat2"} <= {*points}
    assert len(points) >= (60 if disturbance == "fail" else 200)
    one_sided = [table["scenario"] for table in tables if len(table["found"]) == 1]
    assert one_sided == ["two ranks, second killed"], "every other scenario has points before and after its commit"
