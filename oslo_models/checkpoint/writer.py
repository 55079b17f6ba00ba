"""Writes local shards to files: one file per rank (split), or the files of the whole model (merged)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.checkpoint.atomic_commit import replacing
from oslo_models.checkpoint.filenames import MANIFEST, MERGED, index_name, split_name, with_variant
from oslo_models.checkpoint.gather import collect
from oslo_models.checkpoint.inventory import Table, TensorRecord, gather_tables, merge_tables
from oslo_models.checkpoint.manifest import seal, write_manifest
from oslo_models.checkpoint.serialization import SaveFunction, reporting, stream_order, write_weights
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class _File:
    """A file to be written: its tensors, as they are on the meta device, and other names of some of them."""

    name: str
    infos: Mapping[str, Tensor]
    aliases: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos.values())


def save_checkpoint(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: ParallelMesh,
    *,
    merging: bool,
    tied: Mapping[str, str],
    files: Callable[[Path], None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    safe_serialization: bool | None = None,
    save_function: SaveFunction | None = None,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    sign: str = "=",
) -> None:
    """Write what each rank holds to a file of its own or, merged, the whole model as transformers would.

    A collective of all ranks. When it returns on any rank, everything is on the disk. When it raises, it raises on
    every rank, and ``directory`` holds what it held before (or, when only the last step failed, all of the new).

    When merging, tensors come to world rank 0 one at a time and go to the disk at once, so that no rank needs more
    memory than what it holds and one full tensor. A tensor that several stages have is taken from the first of them.

    Args:
        tensors: the local parts of the tensors that this rank holds; plain, or a `DTensor` over the data-parallel axis.
        layouts: how each of them divides over the tensor-parallel axis.
        tied: ``{name: the name that it is another name of}``, the same on every rank. ``.bin`` files have both, sharing
            memory; ``.safetensors`` files cannot, and leave out the first.
        files: writes the other files (``config.json``) into the directory that it is given; called on world rank 0.
        metadata: what else the manifest is to say (``architectures``, ``model_type``, ``dtype``).
        safe_serialization: ``True`` for ``.safetensors``, ``False`` for ``.bin``; otherwise the first when merging.
        save_function: takes the place of `torch.save` for ``.bin``.
        max_shard_size: of merged files, as in transformers' ``save_pretrained``.
        variant: likewise.
        sign: what stands before the numbers in the names of split files: ``"="``, or ``"_"`` as in OSLO 2.

    Raises:
        ValueError: a tensor does not have the shape that its layout gives this rank.
        OSError: the directory cannot be written, or the disk is full.
    """
    world, safe = mesh.world, merging if safe_serialization is None else safe_serialization
    table, stages = gather_tables(f"saving to {directory}", tensors, layouts, mesh, tied)
    if merging:
        table, aliases = merge_tables(stages, tied)
        plan, place = _merged_files(table, {} if safe else aliases, MERGED[not safe], max_shard_size, variant)
        entries = {name: {**_describe(entry), "file": place[name]} for name, entry in table.items()}
        writes, kind = world.rank == 0, {"kind": "merged", "tp": 1, "pp": 1}
    else:
        plan, place = [_split_file(table, mesh, safe, sign)], {}
        entries = _divisions(stages, safe)
        writes, kind = mesh.dp.rank == 0, {"kind": "split", "tp": mesh.tp.size, "pp": mesh.pp.size}

    def take(name: str) -> Tensor | None:
        """The tensor on the CPU of the rank that writes it; a collective of the ranks that have it."""
        entry = table[name]
        tensor = _without_fsdp(tensors[name]) if entry.stage == mesh.pp.rank else None
        if merging:
            return collect(tensor, entry.layout, entry.dtype, entry.stage, mesh)
        return tensor.cpu() if tensor is not None and writes else None

    spooled = merging and not safe
    sizes = [file.nbytes for file in plan] if writes else []
    with replacing(directory, world, sum(sizes) + spooled * max(sizes, default=0), variant) as staging:
        own: dict[str, dict[str, int]] = {}
        for file in plan:
            own |= _write(staging / file.name, file, take, writes, world, save_function, spooled)
        reports = gather_objects(world, own)
        with agree(world, f"writing {MANIFEST}"):
            if world.rank == 0:
                records = {name: record for report in reports for name, record in report.items()}
                if len(plan) > 1:
                    path = staging / index_name(MERGED[not safe], variant)
                    records[path.name] = _write_index(path, table, plan, place)
                if files is not None:
                    files(staging)
                dtypes = [entry["dtype"] for entry in entries.values() if "float" in entry["dtype"]]
                about = {"dtype": next(iter(dtypes), None), **(metadata or {}), **kind, "variant": variant}
                content = {**about, "tied": dict(tied), "tensors": entries, "files": records}
                write_manifest(staging / with_variant(MANIFEST, variant), content)


def _split_file(table: Table, mesh: ParallelMesh, safe: bool, sign: str) -> _File:
    """The file of this rank."""
    aliases = {name: entry.alias_of for name, entry in table.items() if entry.alias_of is not None}
    infos = {
        name: _meta(entry.layout.local_shape(mesh.tp.rank), entry.dtype)
        for name, entry in table.items()
        if name not in aliases
    }
    return _File(split_name(mesh.tp.rank, mesh.pp.rank, safe, sign), infos, {} if safe else aliases)


def _divisions(stages: Sequence[Table], safe: bool) -> dict[str, dict[str, Any]]:
    """What the manifest says of the tensors in split files."""
    entries: dict[str, dict[str, Any]] = {}
    for stage in stages:
        for name, entry in stage.items():
            if not (safe and entry.alias_of):
                division: dict[str, Any] = {"dim": entry.layout.dim, "ranges": entry.layout.ranges, "stages": []}
                entries.setdefault(name, {**_describe(entry), **division})["stages"].append(entry.stage)
    return entries


def _merged_files(
    table: Table, aliases: Mapping[str, str], base: str, max_shard_size: int | str, variant: str | None
) -> tuple[list[_File], dict[str, str]]:
    """The files of the whole model, and by name the file of each tensor."""
    stem, suffix = with_variant(base, variant).rsplit(".", 1)
    infos = {name: _meta(entry.layout.shape, entry.dtype) for name, entry in table.items()}
    pattern = f"{stem}{{suffix}}.{suffix}"
    shards = split_torch_state_dict_into_shards(infos, filename_pattern=pattern, max_shard_size=max_shard_size)
    place = dict(shards.tensor_to_filename)
    place |= {alias: place[name] for alias, name in aliases.items()}
    plan = []
    for filename, names in shards.filename_to_tensors.items():
        shared = {alias: name for alias, name in aliases.items() if name in names}
        plan.append(_File(filename, {name: infos[name] for name in names}, shared))
    return plan, place


def _write_index(path: Path, table: Table, plan: Sequence[_File], place: Mapping[str, str]) -> dict[str, int]:
    count = sum(math.prod(entry.layout.shape) for entry in table.values())
    sums = {"total_parameters": count, "total_size": sum(file.nbytes for file in plan)}
    path.write_text(json.dumps({"metadata": sums, "weight_map": place}, indent=2, sort_keys=True) + "\n")
    return seal(path)


def _write(
    path: Path,
    file: _File,
    take: Callable[[str], Tensor | None],
    writes: bool,
    world: Axis,
    save_function: SaveFunction | None,
    spooled: bool,
) -> dict[str, dict[str, int]]:
    """Write one file and return its record by name, on the ranks that write it. A collective of all ranks."""
    tensors: Iterator[Any] = (take(name) for name in stream_order(file.infos))
    with agree(world, f"writing {path.name}"):
        try:
            if not writes:
                return {}
            with reporting(path, file.nbytes, world.rank):
                write_weights(path, file.infos, tensors, file.aliases, save_function, spooled)
                return {path.name: seal(path)}
        finally:
            for _ in tensors:  # until then peers wait for this rank to take part
                pass


def _describe(entry: TensorRecord) -> dict[str, Any]:
    return {"shape": entry.layout.shape, "dtype": str(entry.dtype).removeprefix("torch.")}


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _without_fsdp(tensor: Tensor) -> Tensor:
    """The whole of what the tensor-parallel rank holds. A collective of the data-parallel axis for a `DTensor`."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
