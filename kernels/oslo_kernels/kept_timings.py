"""Keep timings of products in memory and in the user's cache folder, so that a machine measures a shape once.

The file name is a hash of the other dependencies of a timing: the processor, its number of cores, the torch version
and the kernel source.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch

from oslo_kernels.build import cache_folder, is_trusted, processor, texts_of

Seconds = tuple[float, float]
"""The time of a product here, and the time of the same product in torch."""
Timings = Mapping[int, Mapping[str, Seconds]]
"""Seconds by number of rows and by implementation."""


class KeptTimings:
    """The timings measured by this process and, with a file, by earlier ones.

    An unreadable file counts as empty. If the file cannot be written, timings stay in memory.

    Args:
        in_file: whether to keep timings beyond this process.
    """

    def __init__(self, in_file: bool = True) -> None:
        self._in_file = in_file
        self._here: dict[str, Timings | str] = {}

    def get(self, key: str) -> Timings | str | None:
        """Return the timings of this key, the reason why there are none, or ``None`` if it was not measured."""
        if key not in self._here and self._in_file and (found := self._read().get(key)):
            self._here[key] = found
        return self._here.get(key)

    def add(self, key: str, found: Timings | str) -> None:
        """Keep timings or, for this process only, the reason why there are none."""
        self._here[key] = found
        if self._in_file and not isinstance(found, str):
            with suppress(OSError):
                self._write({**self._read(), key: found})

    def _read(self) -> dict[str, Timings]:
        try:
            if not is_trusted(self._path):
                return {}
            kept = json.loads(self._path.read_text())
            return {key: {int(n): _read_ways(ways) for n, ways in rows.items()} for key, rows in kept.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write(self, kept: Mapping[str, Timings]) -> None:
        """Replace the file atomically. If two processes write, the later one's timings remain."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            new = Path(folder, self._path.name)
            new.write_text(json.dumps(kept, indent=1))
            new.chmod(0o600)
            new.replace(self._path)

    @cached_property
    def _path(self) -> Path:
        parts = (
            processor(),
            str(os.cpu_count()),
            str(torch.__version__),
            *texts_of("linear.cpp"),
            *texts_of("decoder_block.cpp"),
            *texts_of("split_product.cpp"),
        )
        return cache_folder() / f"linear-timings-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"


def _read_ways(ways: Mapping[str, list[float]]) -> dict[str, Seconds]:
    return {way: (float(here), float(torchs)) for way, (here, torchs) in ways.items()}
