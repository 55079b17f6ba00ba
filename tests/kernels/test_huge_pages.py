"""Weights in pages of 2 MiB: contents and addresses stay, and nothing else is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from oslo_kernels import huge_pages
from oslo_kernels.huge_pages import PAGE, collapse


def huge_bytes() -> int:
    """Of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def is_supported() -> bool:
    """Whether the system has such pages, and gives them to whoever asks for them."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split(".")[:2])
    return sys.platform == "linux" and setting.exists() and "[never]" not in setting.read_text() and release >= (6, 1)


@pytest.mark.skipif(not is_supported(), reason="needs Linux 6.1 with transparent huge pages")
def test_contents_and_addresses_stay() -> None:
    tensors = [torch.arange(3 * PAGE // 4 + i, dtype=torch.int32) for i in range(4)]
    copies, addresses = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    before = huge_bytes()
    assert collapse(tensors, budget=60) >= 4
    assert huge_bytes() - before >= 4 * PAGE
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)


def test_small_tensors_files_and_other_systems_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert collapse([torch.zeros(1000), torch.empty(PAGE, device="meta")]) == 0
    assert collapse([torch.zeros(4 * PAGE)], budget=-1.0) == 0
    (tmp_path / "weights").write_bytes(bytes(4 * PAGE))
    mapped = torch.from_file(str(tmp_path / "weights"), shared=True, size=4 * PAGE, dtype=torch.uint8)
    collapse([mapped])
    assert not mapped.any()
    monkeypatch.setattr(huge_pages, "_advise", lambda: None)
    assert collapse([nn.Parameter(torch.zeros(4 * PAGE))]) == 0
