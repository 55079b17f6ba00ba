"""Opens a checkpoint: from its files to a reader that knows how they divide each tensor. Also checks files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from oslo_models.checkpoint.filenames import MANIFEST, CheckpointError
from oslo_models.checkpoint.locate import find, mismatch
from oslo_models.checkpoint.manifest import checksum
from oslo_models.checkpoint.reader import CheckpointReader, Stored
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree
from oslo_models.sharding.layout import Layout

FallbackLayout = Callable[[str, list[tuple[int, ...]]], Layout | None]
"""``(name, local shapes on all tp ranks) -> Layout``, for split files that say nothing of their layout; ``None`` where
the shapes fit none."""
OwnerStage = Callable[[str, int], int]
"""``(name, number of stages) -> stage`` whose file has the live copy of a tensor, for old split files."""


def open_checkpoint(
    directory: str | os.PathLike[str],
    *,
    variant: str | None = None,
    fallback_layout: FallbackLayout | None = None,
    owner_stage: OwnerStage | None = None,
) -> CheckpointReader:
    """Open a checkpoint. Not a collective: call it on every rank, inside `agree`.

    A manifest says which files make up the checkpoint. Without one, split files are taken before merged ones but have
    to form a full grid, and merged ones are taken in transformers' order: safetensors, its index, ``.bin``, its index.

    Args:
        variant: as transformers' ``variant``.
        fallback_layout: gives the layouts of split files without a manifest.
        owner_stage: says which stage's file is live where old files hold every layer; default: the first that has it.

    Raises:
        FileNotFoundError: there is no checkpoint, or files of it are missing and no manifest names them.
        CheckpointError: a file is damaged, missing or not one of this checkpoint.
    """
    source = Path(directory)
    while True:
        before = _identity(source)
        try:
            reader = find(source, variant)
            reader.tensors.update(_tensors(reader, fallback_layout, owner_stage))
        except OSError:
            if _identity(source) == before:
                raise
        else:
            if _identity(source) == before:  # otherwise a save has put another checkpoint in its place meanwhile
                return reader


def verify_checkpoint(reader: CheckpointReader, axis: Axis) -> None:
    """Compare every file with its checksum in the manifest. A collective: the ranks of ``axis`` share the files out.

    Without a manifest, no more is checked than that every file can be read.

    Raises:
        CheckpointError: on every rank; names the file, what was expected and what was found.
    """
    with agree(axis, f"verifying {reader.where}"):
        for name in list(reader.files)[axis.rank :: axis.size]:
            file = reader.files[name]
            if reader.manifest is None:
                _ = file.views
                continue
            expected, actual = reader.manifest["files"][name]["crc32"], checksum(file.fd)
            if actual != expected:
                raise mismatch(file.path, f"CRC-32 {expected:08x}", f"{actual:08x}")


def _tensors(
    reader: CheckpointReader, fallback_layout: FallbackLayout | None, owner_stage: OwnerStage | None
) -> dict[str, Stored]:
    if not reader.grid:
        files = reader.files.values()
        views = [(name, view, file) for file in files for name, view in file.views.items()]
        return {name: Stored(Layout(tuple(view.shape)), view.dtype, (file,)) for name, view, file in views}
    if reader.manifest is None:
        return _by_shapes(reader, fallback_layout, owner_stage)
    stored = {}
    for name, entry in reader.manifest["tensors"].items():
        ranges = tuple(tuple((start, stop) for start, stop in pieces) for pieces in entry["ranges"])
        layout = Layout(tuple(entry["shape"]), entry["dim"], ranges)
        holders = [reader.files[reader.grid[t, entry["stages"][0]]] for t in range(len(ranges) or 1)]
        stored[name] = Stored(layout, getattr(torch, entry["dtype"]), holders)
    return stored


def _by_shapes(
    reader: CheckpointReader, fallback_layout: FallbackLayout | None, owner_stage: OwnerStage | None
) -> dict[str, Stored]:
    """Old split files: the layout follows from the shapes, and with several stages each may hold every tensor."""
    tp, pp = reader.split or (1, 1)
    stages: dict[str, list[int]] = {}
    for stage in range(pp):
        for name in reader.files[reader.grid[0, stage]].views:
            stages.setdefault(name, []).append(stage)
    stored = {}
    for name, having in stages.items():
        stage = owner_stage(name, pp) if owner_stage and len(having) > 1 else having[0]
        holders = [reader.files[reader.grid[t, stage]] for t in range(tp)]
        if fallback_layout is None and tp > 1:
            raise ValueError(f"{reader.where} holds split files without {MANIFEST}: pass fallback_layout to read them")
        shapes = [tuple(file.views[name].shape) for file in holders if name in file.views]
        layout = expected = None
        if len(shapes) == tp:
            layout = fallback_layout(name, shapes) if fallback_layout else Layout(shapes[0])
        if layout is not None:
            expected = [layout.local_shape(rank) for rank in range(tp if layout.dim is None else len(layout.ranges))]
        if layout is None or shapes != expected:
            raise CheckpointError(
                f"{', '.join(str(file.path) for file in holders)}: expected {name} with shapes "
                f"{expected or 'of one sharded tensor'}, found {shapes}; the files are of another model than "
                f"config.json says, or were not saved together"
            )
        holders = holders[: len(layout.ranges) or 1]
        stored[name] = Stored(layout, holders[0].views[name].dtype, holders)
    return stored


def _identity(directory: Path) -> tuple[int, int] | None:
    """Tells whether the directory was exchanged for another."""
    try:
        stat = os.stat(directory)
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino
