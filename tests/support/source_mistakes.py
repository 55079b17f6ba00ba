"""Puts mistakes into a C++ source while a test runs, to check that the test fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from oslo_kernels import build


@contextmanager
def threads(count: int, module: ModuleType) -> Iterator[None]:
    """Give torch ``count`` threads, and let `module` of ``oslo_kernels`` use all of them for any amount of work."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with mock.patch.object(module, "_PER_THREAD", 1):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def mistake(module: ModuleType, right: str, wrong: str, folder: Path) -> Iterator[None]:
    """Within the block, `module` runs a copy of its C++ source that replaces the single ``right`` by ``wrong``."""
    for source in build.SOURCES.glob("*"):
        (folder / source.name).write_bytes(source.read_bytes())
    path = folder / f"{module.__name__.rpartition('.')[2]}.cpp"
    text = path.read_text()
    if text.count(right) != 1:
        raise LookupError(f"{right!r} is {text.count(right)} times in {path.name}: write the mistake anew")
    path.write_text(text.replace(right, wrong))
    build.load.cache_clear(), module._library.cache_clear()
    try:
        with (
            mock.patch.object(build, "SOURCES", folder),
            mock.patch.object(build, "cache_folder", return_value=folder / "cache"),
        ):
            yield
    finally:
        build.load.cache_clear(), module._library.cache_clear()
