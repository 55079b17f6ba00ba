"""New memory in pages of 2 MiB: other memory keeps its pages."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from oslo_kernels import huge_pages
from oslo_kernels.huge_pages import FEWEST, PAGE, fresh


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
    return sys.platform == "linux" and setting.exists() and "[never]" not in setting.read_text()


@pytest.mark.skipif(not is_supported(), reason="needs Linux with transparent huge pages")
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
