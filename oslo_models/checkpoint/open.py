"""Opens checkpoints, with or without a manifest, and verifies their files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from oslo_models.checkpoint.checksum import file_checksum
from oslo_models.checkpoint.filenames import MANIFEST, CheckpointError
from oslo_models.checkpoint.journal import identity
from oslo_models.checkpoint.locate import manifest_mismatch, open_files
from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.sharding.layout import Layout

FallbackLayout = Callable[[str, list[tuple[int, ...]]], Layout | None]
"""``(name, local shapes on all tp ranks) -> Layout`` for split files without a manifest; ``None`` if the shapes fit no
layout."""
OwnerStage = Callable[[str, int], int]
"""``(name, number of stages) -> stage`` with the trained copy of a tensor, for split files of OSLO 1.x."""


def open_checkpoint(
    directory: str | os.PathLike[str],
    *,
    variant: str | None = None,
    fallback_layout: FallbackLayout | None = None,
    owner_stage: OwnerStage | None = None,
) -> CheckpointReader:
    """Open a checkpoint. Not a collective: call it on every rank, within `agree`.

    The manifest lists the files. Without a manifest, split files take precedence over merged files and must be
    complete. Merged files are searched in transformers' order: safetensors, its index, ``.bin``, its index.

    Args:
        directory: the directory of the checkpoint.
        variant: as in transformers' ``from_pretrained``.
        fallback_layout: infers the layouts of split files without a manifest.
        owner_stage: the stage with the trained copy of a tensor, since files of OSLO 1.x hold every layer on every
            stage. Defaults to the first stage.

    Raises:
        FileNotFoundError: there is no checkpoint, or files are missing and no manifest names them.
        CheckpointError: a file is damaged, missing or belongs to another checkpoint.
    """
    source = Path(directory)
    while True:
        before = identity(source)
        try:
            reader = open_files(source, variant)
            reader.tensors.update(_stored_tensors(reader, fallback_layout, owner_stage))
        except OSError:
            if identity(source) == before:
                raise
        else:
            if identity(source) == before:  # otherwise a save has replaced the checkpoint: open the new one
                return reader


def verify_checkpoint(reader: CheckpointReader, axis: Axis) -> None:
    """Compare every file with its checksum in the manifest. A collective of ``axis``.

    Ranks on one host with the same open file share the work, so each host checks each of its files once. Without a
    manifest, only check that every file can be read.

    Raises:
        CheckpointError: on every rank, with the host, the file, the expected and the actual checksum.
    """
    host, own = socket.gethostname(), _identities(reader)
    ranks = gather_objects(axis, own)
    with agree(axis, f"verifying {reader.directory} on {host}"):
        for number, (name, file) in enumerate(reader.files.items()):
            sharing = [rank for rank, found in enumerate(ranks) if found.get(name) == own[name]]
            if sharing[number % len(sharing)] != axis.rank:
                continue
            if reader.manifest is None:
                _ = file.views
                continue
            expected, actual = reader.manifest["files"][name]["crc32"], file_checksum(file.fd)
            if actual != expected:
                raise manifest_mismatch(f"{file.path} on {host}", f"CRC-32 {expected:08x}", f"{actual:08x}")


def _identities(reader: CheckpointReader) -> dict[str, tuple[str, int, int]]:
    """Return the identity of each open file: boot id of the host, device and inode."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        system = socket.gethostname()
    found = {name: os.fstat(file.fd) for name, file in reader.files.items()}
    return {name: (system, status.st_dev, status.st_ino) for name, status in found.items()}


def _stored_tensors(
    reader: CheckpointReader, fallback_layout: FallbackLayout | None, owner_stage: OwnerStage | None
) -> dict[str, StoredTensor]:
    """Return the layout, dtype and files of each tensor."""
    if not reader.grid:
        views = [(name, view, file) for file in reader.files.values() for name, view in file.views.items()]
        return {name: StoredTensor(Layout(tuple(view.shape)), view.dtype, (file,)) for name, view, file in views}
    if reader.manifest is None:
        return _stored_without_manifest(reader, fallback_layout, owner_stage)
    try:
        return _stored_by_manifest(reader, reader.manifest)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{reader.directory / MANIFEST} describes tensors that its files cannot have ({error!r:.200}); no save "
            "wrote this manifest: copy it again, or remove it"
        ) from error


def _stored_by_manifest(reader: CheckpointReader, manifest: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the layout, dtype and files of each tensor of split files from the manifest."""
    stored = {}
    for name, entry in manifest["tensors"].items():
        ranges = tuple(tuple((start, stop) for start, stop in pieces) for pieces in entry["ranges"])
        first_ranges = tuple(((start, stop),) for start, stop in entry.get("first_ranges", ()))
        layout = Layout(tuple(entry["shape"]), entry["dim"], ranges, first_ranges)
        files = [reader.files[reader.grid[t, entry["stages"][0]]] for t in range(len(ranges) or 1)]
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{entry['dtype']!r} is not a numeric dtype")
        stored[name] = StoredTensor(layout, dtype, files)
    return stored


def _stored_without_manifest(
    reader: CheckpointReader, fallback_layout: FallbackLayout | None, owner_stage: OwnerStage | None
) -> dict[str, StoredTensor]:
    """Infer the layouts of tensors in split files without a manifest. Each stage may hold every tensor."""
    tp, pp = reader.split or (1, 1)
    stages: dict[str, list[int]] = {}
    for stage in range(pp):
        for name in reader.files[reader.grid[0, stage]].views:
            stages.setdefault(name, []).append(stage)
    stored = {}
    for name, stages_with_it in stages.items():
        stage = owner_stage(name, pp) if owner_stage and len(stages_with_it) > 1 else stages_with_it[0]
        files = [reader.files[reader.grid[t, stage]] for t in range(tp)]
        if fallback_layout is None and tp > 1:
            raise ValueError(
                f"{reader.directory} holds split files without {MANIFEST}: pass fallback_layout to read them"
            )
        shapes = [tuple(file.views[name].shape) for file in files if name in file.views]
        layout = expected = None
        if len(shapes) == tp:
            layout = fallback_layout(name, shapes) if fallback_layout else Layout(shapes[0])
        if layout is not None:
            expected = [layout.local_shape(rank) for rank in range(tp if layout.dim is None else len(layout.ranges))]
        if layout is None or shapes != expected:
            raise CheckpointError(
                f"{', '.join(str(file.path) for file in files)}: expected {name} with shapes "
                f"{expected or 'of one sharded tensor'}, found {shapes}; the files belong to another model than "
                "config.json, or were not saved together"
            )
        files = files[: len(layout.ranges) or 1]
        stored[name] = StoredTensor(layout, files[0].views[name].dtype, files)
    return stored
