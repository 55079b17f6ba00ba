"""Indexed datasets: the binary layout of Megatron, read and written by every implementation."""

from __future__ import annotations

import importlib.util
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oslo_models.data import DatasetForCausalLM
from oslo_models.data.indexed_dataset import CODES, IMPLS, IndexedDataset, write_index

from support import ROOT
from support.corpora import write

INTEGERS = [name for name in CODES if "int" in name]


def test_mmap_index_has_the_layout_of_megatron(tmp_path: Path) -> None:
    """MMIDIDX, version 1, as in megatron/core/datasets/indexed_dataset.py."""
    codes = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
    assert codes == CODES
    for dtype, code in codes.items():
        write(tmp_path / "a", [3, 0, 5], dtype)
        size = np.dtype(dtype).itemsize
        assert (tmp_path / "a.bin").read_bytes() == np.arange(8).astype(dtype).tobytes()
        assert (tmp_path / "a.idx").read_bytes() == (
            b"MMIDIDX\x00\x00"
            + struct.pack("<QB", 1, code)
            + struct.pack("<QQ", 3, 4)
            + struct.pack("<3i", 3, 0, 5)
            + struct.pack("<3q", 0, 3 * size, 3 * size)
            + struct.pack("<4q", 0, 1, 2, 3)
        )


def test_lazy_index_has_the_layout_of_fairseq(tmp_path: Path) -> None:
    """TNTIDX, as fairseq, OSLO and older Megatrons write it."""
    write(tmp_path / "a", [3, 5], "int32", "lazy")
    assert (tmp_path / "a.idx").read_bytes() == (
        b"TNTIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<QQ", 4, 4)
        + struct.pack("<QQ", 2, 2)
        + struct.pack("<Q", 3)
        + struct.pack("<3q", 0, 1, 2)
        + struct.pack("<3q", 0, 3, 8)
        + struct.pack("<2q", 3, 5)
        + struct.pack("<3q", 0, 1, 2)
    )


@pytest.mark.parametrize("written", IMPLS)
@pytest.mark.parametrize("dtype", CODES)
def test_every_format_and_dtype_is_read_by_every_implementation(
    dtype: str, written: str, tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, 20).astype(np.int32)
    tokens = rng.integers(0, 100, lengths.sum()).astype(dtype)
    tokens.tofile(tmp_path / "of.a.bin")
    write_index(tmp_path / "of.a.idx", lengths, dtype, written)
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    for impl in IMPLS:
        dataset = IndexedDataset(tmp_path / "of.a", impl)
        assert dataset.dtype == dtype and len(dataset) == 20 and np.array_equal(dataset.lengths, lengths)
        copy = pickle.dumps(dataset)
        assert len(copy) < 500
        for found in (dataset, pickle.loads(copy)):
            assert all(np.array_equal(*pair) for pair in zip(found, documents, strict=True))
        assert np.array_equal(dataset[-1], documents[-1])
        assert all(np.array_equal(*pair) for pair in zip(dataset[3:7], documents[3:7], strict=True))
        longest = int(lengths.argmax())
        assert np.array_equal(dataset.get(longest, 1, 2), documents[longest][1:3])
        for wrong in ((20,), (0, 0, int(lengths[0]) + 1), (longest, -1)):
            with pytest.raises(IndexError):
                dataset.get(*wrong)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_core_reads_and_writes_the_same_files(tmp_path: Path) -> None:
    """Run in a separate process, because importing Megatron takes seconds."""
    for dtype in CODES:
        write(tmp_path / f"ours-{dtype}", [3, 0, 5, 2], dtype, ends=[0, 2, 4])
    script = f"""
import warnings; warnings.filterwarnings("ignore")
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
for dtype in {list(CODES)}:
    for mmap in (True, False):
        dataset = IndexedDataset({str(tmp_path)!r} + "/ours-" + dtype, mmap=mmap)
        assert dataset.index.dtype == numpy.dtype(dtype) and len(dataset) == 4
        assert [dataset[i].tolist() for i in range(4)] == [[0, 1, 2], [], [3, 4, 5, 6, 7], [8, 9]]
        assert dataset.document_indices.tolist() == [0, 2, 4]
    name = {str(tmp_path)!r} + "/theirs-" + dtype
    builder = IndexedDatasetBuilder(name + ".bin", dtype=getattr(numpy, dtype))
    builder.add_document(torch.arange(8), [3, 0, 5][:3])
    builder.add_document(torch.arange(8, 10), [2])
    builder.finalize(name + ".idx")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for dtype in CODES:
        write(tmp_path / "again", [3, 0, 5, 2], dtype, ends=[0, 3, 4])
        for ending in (".bin", ".idx"):
            theirs = (tmp_path / f"theirs-{dtype}{ending}").read_bytes()
            assert theirs == (tmp_path / f"again{ending}").read_bytes()
        dataset = IndexedDataset(tmp_path / f"theirs-{dtype}")
        assert [found.tolist() for found in dataset] == [[0, 1, 2], [], [3, 4, 5, 6, 7], [8, 9]]


def test_documents_of_several_sequences_are_kept(tmp_path: Path) -> None:
    """Megatron splits documents into sentences; its merged files may lack useful document boundaries."""
    for ends, sizes in (([0, 2, 2, 4], [3, 0, 7]), ([0, 1], [3, 0, 5, 2]), ([0, 1, 2, 3, 4], [3, 0, 5, 2])):
        for impl in ("mmap", "lazy"):
            tokens = write(tmp_path / "a", [3, 0, 5, 2], "int32", impl, ends)
            dataset = IndexedDataset(tmp_path / "a")
            starts, lengths = dataset.documents()
            assert lengths.tolist() == sizes
            read = [dataset.read(int(start) // dataset.stride, size) for start, size in zip(starts, sizes, strict=True)]
            assert np.array_equal(np.concatenate(read), tokens)


def test_dtype_code_7_of_older_files_is_float64(tmp_path: Path) -> None:
    tokens = write(tmp_path / "a", [3, 4], "float64")
    index = bytearray((tmp_path / "a.idx").read_bytes())
    assert index[17] == 6
    index[17] = 7
    (tmp_path / "a.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "a")
    assert dataset.dtype == np.float64 and np.array_equal(dataset[1], tokens[3:])


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
def test_damaged_index_is_named(tmp_path: Path, impl: str) -> None:
    write(tmp_path / "a", [3, 4], impl=impl)
    index, data = (tmp_path / "a.idx").read_bytes(), (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"a\.bin has 27 bytes.*28"):
        IndexedDataset(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(data)
    for cut, message in ((-1, "cut short"), (20, "not the index"), (0, "not the index")):
        (tmp_path / "a.idx").write_bytes(index[:cut])
        with pytest.raises(ValueError, match=message):
            IndexedDataset(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(index.replace(b"\x01", b"\x02", 1))
    with pytest.raises(ValueError, match="version 2"):
        IndexedDataset(tmp_path / "a")
    with pytest.raises(ValueError, match="binarization_impl='disk'"):
        IndexedDataset(tmp_path / "a", "disk")
    with pytest.raises(ValueError, match="uint32"):
        write_index(tmp_path / "a.idx", np.array([1]), "uint32")


def test_empty_dataset_is_read(tmp_path: Path) -> None:
    for written in IMPLS:
        write(tmp_path / "a", [], impl=written)
        assert all(len(IndexedDataset(tmp_path / "a", impl)) == 0 for impl in IMPLS)


def damage(path: Path, offset: int, value: int, size: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset : offset + size] = value.to_bytes(size, "little", signed=True)
    path.write_bytes(data)


@pytest.mark.parametrize("value", [31, 29, -1, 1 << 28, 0])
@pytest.mark.parametrize("written", ["mmap", "lazy"])
def test_a_damaged_length_or_position_is_named_before_it_is_used(tmp_path: Path, written: str, value: int) -> None:
    count, number = 200, 77
    if written == "mmap":
        lengths, starts, sizes = 34, 34 + 4 * count, (4, 8)
    else:
        starts = 56 + 8 * (count + 1)
        lengths, sizes = starts + 8 * (count + 1), (8, 8)
    for begin, size in ((lengths, sizes[0]), (starts, sizes[1])):
        write(tmp_path / "a", [30] * count, "uint16", written)
        damage(tmp_path / "a.idx", begin + size * number, value, size)
        with pytest.raises(ValueError, match=r"a\.idx: document 7[78] "):
            DatasetForCausalLM(str(tmp_path / "a"), 16)
        assert {path.name for path in tmp_path.iterdir()} == {"a.idx", "a.bin"}, "nothing was written"
    write(tmp_path / "a", [30] * count, "uint16", written)
    damage(tmp_path / "a.idx", lengths + sizes[0] * (count - 1), (1 << (8 * sizes[0] - 1)) - 1, sizes[0])
    with pytest.raises(ValueError, match=r"cut short|document 199"):
        IndexedDataset(tmp_path / "a")


def test_a_damaged_boundary_of_documents_is_named(tmp_path: Path) -> None:
    for number, value in ((0, 1), (1, 3), (1, 1 << 40), (1, -5)):
        write(tmp_path / "a", [3, 0, 5, 2], ends=[0, 2, 4])
        damage(tmp_path / "a.idx", 34 + 12 * 4 + 8 * number, value, 8)
        if (number, value) == (1, 3):  # a consistent other division
            assert len(IndexedDataset(tmp_path / "a").documents()[1]) == 2
            continue
        with pytest.raises(ValueError, match=r"a\.idx: document"):
            IndexedDataset(tmp_path / "a").documents()


@pytest.mark.parametrize("field", ["documents", "bounds", "shuffle"])
def test_a_damaged_cache_of_samples_is_named(tmp_path: Path, field: str) -> None:
    """Otherwise a sample would have tokens of other documents, or of uninitialised memory."""
    write(tmp_path / "a", [30] * 20, "uint16")
    DatasetForCausalLM(str(tmp_path / "a"), 16)
    (path,) = (tmp_path / "a.index").glob(f"*/{field}.npy")
    data = np.load(path)
    changed = data.copy()
    changed[3] = data[4]
    for wrong in (changed, data[:-1], data[None], data.astype(float)):
        np.save(path, wrong)
        with pytest.raises(ValueError, match=r"is damaged .*; delete this folder"):
            DatasetForCausalLM(str(tmp_path / "a"), 16)
    (path.parent / "checksums.json").unlink()
    for wrong in (data[:-1], data[None], data.astype(float)):  # as earlier releases wrote it
        np.save(path, wrong)
        with pytest.raises(ValueError, match=r"is damaged .*; delete this folder"):
            DatasetForCausalLM(str(tmp_path / "a"), 16)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"is damaged .*; delete this folder"):
        DatasetForCausalLM(str(tmp_path / "a"), 16)
