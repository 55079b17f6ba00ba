"""Weights on their way to a GPU pass through two buffers. The GPU's memory, its stream and events are mocked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oslo_models import registry
from oslo_models.checkpoint import CheckpointError, CheckpointReader, open_checkpoint, save_checkpoint
from oslo_models.checkpoint.pinned_buffers import PinnedBuffer, PinnedBuffers, blocks_of, pinned_buffers
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.modeling import construction
from oslo_models.sharding.layout import Layout

from support import zoo
from support.layouts import distinct, layouts

CPU = torch.device("cpu")


class Delayed(PinnedBuffer):
    """Buffer with a stream that copies as late as possible: when somebody waits for the copy."""

    made: list[Delayed] = []

    def __init__(self, device: torch.device, size: int) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8)
        self._pending: Tensor | None = None
        self._lock = threading.Lock()
        self.copied = 0
        Delayed.made.append(self)

    def start_copy(self, target: Tensor) -> None:
        assert self._pending is None, "the buffer was filled before its last copy"
        self._pending = target
        self.copied += target.nbytes

    def wait(self) -> None:
        with self._lock:
            if self._pending is not None:
                self._pending.copy_(self.like(self._pending))
                self._pending = None


@pytest.fixture(autouse=True)
def made() -> Iterator[list[Delayed]]:
    Delayed.made.clear()
    yield Delayed.made


def save(folder: Path, tensors: dict[str, Tensor]) -> CheckpointReader:
    cut = {name: Layout(tuple(tensor.shape)) for name, tensor in tensors.items()}
    save_checkpoint(folder, tensors, cut, ParallelMesh(), merging=True, tied={})
    return open_checkpoint(folder)


@given(st.data(), st.sampled_from([8, 40, 64, 1000]))
@settings(max_examples=40)
def test_any_layout_is_read_through_two_buffers(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int
) -> None:
    wanted, ranks = data.draw(layouts())
    full = distinct(wanted.shape)
    reader = save(tmp_path_factory.mktemp("saved"), {"x": full})
    buffers = PinnedBuffers(CPU, size, Delayed)
    for rank in range(ranks):
        part = reader.slice("x", wanted, rank)
        part.buffers = buffers
        assert torch.equal(part[...], wanted.shard(full, rank))
        assert torch.equal(buffers.copy(full), full)


def test_blocks_cover_each_element_once() -> None:
    for shape in ((), (0, 3), (7,), (5, 3), (2, 3, 4), (1, 6)):
        for limit in (1, 2, 5, 100):
            count = torch.zeros(shape, dtype=torch.int64)
            for index in blocks_of(shape, limit):
                count[index] += 1
                assert count[index].numel() <= limit
            assert (count == 1).all()


def test_threads_share_two_buffers(tmp_path: Path, made: list[Delayed]) -> None:
    tensors = {f"x{i}": torch.randn(50, 30) for i in range(20)}
    reader, buffers = save(tmp_path, tensors), PinnedBuffers(CPU, 1000, Delayed)

    def read(name: str) -> bool:
        part = reader.slice(name, Layout((50, 30)), 0)
        part.buffers = buffers
        return torch.equal(part[...], tensors[name])

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(read, tensors))
    assert len(made) == 2 and sum(each.copied for each in made) == 20 * 50 * 30 * 4


def test_error_of_a_reader_frees_its_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.randn(50, 30)
    reader, buffers = save(tmp_path, {"x": full}), PinnedBuffers(CPU, 1000, Delayed)
    part = reader.slice("x", Layout((50, 30)), 0)
    part.buffers = buffers
    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError):
            patch.setattr(CheckpointReader, "copy_region", fails)
            part[...]
    assert torch.equal(part[...], full)


def fails(*args: Any) -> None:
    raise CheckpointError("truncated")


@pytest.mark.parametrize("variant", ["gpt2", "mixtral"])
def test_model_for_a_gpu_is_loaded_through_two_buffers(
    tmp_path: Path, made: list[Delayed], monkeypatch: pytest.MonkeyPatch, variant: str, seed: int
) -> None:
    """No part of a stored tensor is in other memory of the host. Experts of Mixtral are stacked in it first."""
    cls: Any = registry.find(zoo.lm_head(variant))
    before = cls.from_config_with_parallel(zoo.config(variant), seed=seed)
    before.save_pretrained(tmp_path)
    expected = before.state_dict()
    read = CheckpointReader.read
    others: list[str] = []

    def noted(self: CheckpointReader, name: str, *args: Any) -> Tensor:
        others.append(name)
        return read(self, name, *args)

    monkeypatch.setattr(CheckpointReader, "read", noted)
    loaded = cls.from_pretrained_with_parallel(tmp_path)
    assert not made, "a CPU needs no buffers"
    others.clear()
    monkeypatch.setattr(construction, "device_map", lambda device: {"": device})
    monkeypatch.setattr(construction, "pinned_buffers", lambda device: PinnedBuffers(device, 4096, Delayed))
    loaded = cls.from_pretrained_with_parallel(tmp_path)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert len(made) == 2 and all(each._memory.nbytes == 4096 for each in made)
    copied, needed = sum(each.copied for each in made), sum(param.nbytes for param in loaded.parameters())
    assert copied >= needed, f"{needed - copied} of {needed} bytes took another way"
    assert all("experts" in name for name in others), others


def test_buffers_are_for_gpus_that_grant_them(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    assert pinned_buffers(CPU) is None

    def refused(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Event", object)
    monkeypatch.setattr(torch, "empty", refused)
    assert pinned_buffers(torch.device("cuda", 0)) is None
    assert "without page-locked memory" in caplog.text
