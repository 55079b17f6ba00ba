"""Weights in pages of 2 MiB: contents and addresses stay, and nothing else is touched."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from oslo_kernels import huge_pages
from oslo_kernels.huge_pages import FEWEST, PAGE, collapse, fresh


def huge_bytes() -> int:
    """Return the bytes in huge pages of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def new_memory(size: int) -> torch.Tensor:
    """Newly mapped bytes: memory of the allocator may lie in huge pages already, or be filled."""
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def is_supported() -> bool:
    """Whether the system has huge pages, and grants them on request."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return sys.platform == "linux" and setting.exists() and "[never]" not in setting.read_text() and release >= (6, 1)


@pytest.mark.skipif(not is_supported(), reason="needs Linux 6.1 with transparent huge pages")
def test_contents_and_addresses_stay() -> None:
    memory = new_memory(16 * PAGE).view(torch.int32)
    tensors = [torch.arange(3 * PAGE // 4 + i, out=part[: 3 * PAGE // 4 + i]) for i, part in enumerate(memory.chunk(4))]
    copies, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    before = huge_bytes()
    assert collapse(tensors, budget=60) >= 4
    assert huge_bytes() - before >= 4 * PAGE
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.skipif(not is_supported(), reason="needs Linux 6.1 with transparent huge pages")
def test_fresh_memory_is_huge() -> None:
    before = huge_bytes()
    large = fresh(new_memory(20 * PAGE))
    assert not large.fill_(3).sub_(3).any()
    assert huge_bytes() - before >= 19 * PAGE


def test_fresh_leaves_pages_with_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole pages of large CPU tensors are advised."""
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda *arguments: asked.append(arguments))
    memory = torch.empty((FEWEST + 2) * PAGE, dtype=torch.uint8)
    first = -memory.data_ptr() % PAGE
    for begin, size in ((first, FEWEST * PAGE - 1), (first + 1, FEWEST * PAGE)):
        fresh(memory[begin : begin + size])
    fresh(memory.to("meta"))
    assert not asked
    fresh(memory[first : first + FEWEST * PAGE + 5])
    assert asked == [(memory.data_ptr() + first, FEWEST * PAGE, huge_pages._HUGE)]
    monkeypatch.setattr(huge_pages, "_advise", lambda: None)
    assert fresh(memory) is memory


def test_small_tensors_files_and_other_systems_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collapse([torch.zeros(1000), torch.empty(PAGE, device="meta")]) == 0
    assert collapse([torch.zeros(4 * PAGE)], budget=-1.0) == 0
    (tmp_path / "weights").write_bytes(bytes(4 * PAGE))
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=4 * PAGE, dtype=torch.uint8)
    collapse([mapped])
    assert not mapped.any()
    monkeypatch.setattr(huge_pages, "_advise", lambda: None)
    assert collapse([nn.Parameter(torch.zeros(4 * PAGE))]) == 0
