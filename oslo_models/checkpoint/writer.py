"""Writes local shards to files: one file per rank (split), or the files of the whole model (merged)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.checkpoint.holdings import gather_tables, merge_tables
from oslo_models.checkpoint.manifest import seal, write_manifest
from oslo_models.checkpoint.merging import collect
from oslo_models.checkpoint.names import MANIFEST, MERGED, index_name, split_name, with_variant
from oslo_models.checkpoint.staging import replacing
from oslo_models.checkpoint.streams import SaveFunction, open_stream, reporting, stream_order
from oslo_models.checkpoint.weights import TensorInfo
from oslo_models.collectives import agree, gather_objects
from oslo_models.layout import Layout
from oslo_models.mesh import Axis, ParallelMesh

Take = Callable[[str], Tensor | None]
"""Gives a tensor on the CPU to the rank that writes it; a collective of the ranks that have it."""


@dataclass(frozen=True)
class _File:
    """A file to be written; on a rank that does not write it, only its part in the collectives."""

    name: str
    infos: Mapping[str, TensorInfo]
    aliases: Mapping[str, str]
    written_here: bool

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.infos.values())


def save_split(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: ParallelMesh,
    *,
    tied: Mapping[str, str],
    files: Callable[[Path], None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    safe_serialization: bool | None = None,
    save_function: SaveFunction | None = None,
) -> None:
    """Write what each rank holds to a file of its own. A collective of all ranks.

    When it returns on any rank, everything is on the disk. When it raises, it raises on every rank, and ``directory``
    holds what it held before (or, when only the last step failed, all of the new).

    Args:
        tensors: the local parts of the tensors that this rank holds; plain, or a `DTensor` over the data-parallel axis.
        layouts: how each of them divides over the tensor-parallel axis.
        tied: ``{name: the name that it is another name of}``, the same on every rank. ``.bin`` files have both, sharing
            memory; ``.safetensors`` files cannot, and leave out the first.
        files: writes the other files (``config.json``) into the directory that it is given; called on world rank 0.
        metadata: what else the manifest is to say (``architectures``, ``model_type``, ``dtype``).
        safe_serialization: ``True`` for ``.safetensors``, otherwise ``.bin``.
        save_function: takes the place of `torch.save` for ``.bin``.

    Raises:
        ValueError: a tensor does not have the shape that its layout gives this rank.
        OSError: the directory cannot be written, or the disk is full.
    """
    tp, pp, safe = mesh.tp, mesh.pp, bool(safe_serialization)
    table, stages = gather_tables(f"saving to {directory}", tensors, layouts, mesh, tied)
    aliases = {name: entry.alias_of for name, entry in table.items() if entry.alias_of is not None}
    infos = {name: TensorInfo(entry.layout.local_shape(tp.rank), entry.dtype) for name, entry in table.items()}
    file = _File(
        split_name(tp.rank, pp.rank, safe),
        {name: info for name, info in infos.items() if name not in aliases},
        {} if safe else aliases,
        mesh.dp.rank == 0,
    )

    def take(name: str) -> Tensor | None:
        tensor = _without_fsdp(tensors[name])
        return tensor.cpu() if file.written_here else None

    entries: dict[str, Any] = {}
    for stage in stages:
        for name, entry in stage.items():
            if not (safe and entry.alias_of):
                division: dict[str, Any] = {"dim": entry.layout.dim, "ranges": entry.layout.ranges, "stages": []}
                entries.setdefault(name, {**entry.describe(), **division})["stages"].append(entry.stage)
    content = {"kind": "split", "tp": tp.size, "pp": pp.size, "variant": None, "tied": dict(tied), "tensors": entries}
    _save(directory, mesh, [file], take, {**(metadata or {}), **content}, files, save_function)


def save_merged(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: ParallelMesh,
    *,
    tied: Mapping[str, str],
    files: Callable[[Path], None] | None = None,
    metadata: Mapping[str, Any] | None = None,
    safe_serialization: bool | None = None,
    max_shard_size: int | str = "50GB",
    save_function: SaveFunction | None = None,
    variant: str | None = None,
) -> None:
    """Write the whole model as transformers would. A collective of all ranks.

    Tensors come to world rank 0 one at a time and go to the disk at once, so that no rank needs more memory than what
    it holds and one full tensor. A tensor that several stages have is taken from the first of them.

    Args:
        safe_serialization: ``False`` for ``.bin``, otherwise ``.safetensors``.
        max_shard_size: as in transformers' ``save_pretrained``.
        variant: likewise.

    The other arguments, what holds when it returns or raises, and the errors are those of `save_split`.
    """
    _, stages = gather_tables(f"saving to {directory}", tensors, layouts, mesh, tied)
    merged, aliases = merge_tables(stages, tied)
    base = MERGED[safe_serialization is False]
    stem, suffix = with_variant(base, variant).rsplit(".", 1)
    aliases = aliases if suffix == "bin" else {}
    shards = split_torch_state_dict_into_shards(
        {name: torch.empty(entry.layout.shape, dtype=entry.dtype, device="meta") for name, entry in merged.items()},
        filename_pattern=f"{stem}{{suffix}}.{suffix}",
        max_shard_size=max_shard_size,
    )
    plan = []
    for filename, names in shards.filename_to_tensors.items():
        shared = {alias: name for alias, name in aliases.items() if name in names}
        shards.tensor_to_filename.update(dict.fromkeys(shared, filename))
        plan.append(_File(filename, {name: merged[name].info for name in names}, shared, mesh.world.rank == 0))

    def take(name: str) -> Tensor | None:
        entry, tensor = merged[name], tensors.get(name)
        if tensor is not None and entry.stage == mesh.pp.rank:
            tensor = _without_fsdp(tensor)
        return collect(tensor, entry.layout, entry.dtype, entry.stage, mesh)

    entries = {name: {**entry.describe(), "file": shards.tensor_to_filename[name]} for name, entry in merged.items()}
    content = {"kind": "merged", "tp": 1, "pp": 1, "variant": variant, "tied": dict(tied), "tensors": entries}
    index = None
    if shards.is_sharded:
        sums = {"total_parameters": sum(entry.info.count for entry in merged.values()), **shards.metadata}
        index = index_name(base, variant), {"metadata": sums, "weight_map": shards.tensor_to_filename}
    _save(directory, mesh, plan, take, {**(metadata or {}), **content}, files, save_function, spool=True, index=index)


def _save(
    directory: str | os.PathLike[str],
    mesh: ParallelMesh,
    plan: Sequence[_File],
    take: Take,
    content: dict[str, Any],
    files: Callable[[Path], None] | None,
    save_function: SaveFunction | None,
    spool: bool = False,
    index: tuple[str, dict[str, Any]] | None = None,
) -> None:
    """Write the files of the plan, the caller's files, the index and at last the manifest, and put them in place."""
    world = mesh.world
    sizes = [file.nbytes for file in plan if file.written_here]
    needed = sum(sizes) + (max(sizes, default=0) if spool and plan[0].name.endswith(".bin") else 0)
    with replacing(directory, world, needed, content["variant"]) as staging:
        own = {}
        for file in plan:
            record = _write(staging / file.name, file, take, world, save_function, spool)
            if record is not None:
                own[file.name] = record
        reports = gather_objects(world, own)
        with agree(world, f"writing {MANIFEST}"):
            if world.rank == 0:
                records = {name: record for report in reports for name, record in report.items()}
                if index is not None:
                    (staging / index[0]).write_text(json.dumps(index[1], indent=2, sort_keys=True) + "\n")
                    records[index[0]] = seal(staging / index[0])
                if files is not None:
                    files(staging)
                dtypes = [entry["dtype"] for entry in content["tensors"].values() if "float" in entry["dtype"]]
                manifest = {"dtype": next(iter(dtypes), None), **content, "files": records}
                write_manifest(staging / with_variant(MANIFEST, content["variant"]), manifest)


def _write(
    path: Path, file: _File, take: Take, world: Axis, save_function: SaveFunction | None, spool: bool
) -> dict[str, int] | None:
    """Write one file and return its record, on the ranks that write it. A collective of all ranks."""
    failure: Exception | None = None
    record = None

    def attempt(action: Callable[..., Any], *args: Any) -> Any:
        nonlocal failure
        try:
            with reporting(path, file.nbytes, world.rank):
                return action(*args)
        except Exception as error:  # noqa: BLE001  raised below: until then peers wait for this rank to take part
            failure = error

    stream = attempt(open_stream, path, file.infos, file.aliases, save_function, spool) if file.written_here else None
    for name in stream_order(file.infos):
        tensor = take(name)
        if stream is not None and failure is None:
            attempt(stream.add, name, tensor)
        del tensor
    if stream is not None and failure is None:
        attempt(stream.finish)
    with agree(world, f"writing {path.name}"):
        if failure is not None:
            raise failure
        if stream is not None:
            record = seal(path)
    return record


def _without_fsdp(tensor: Tensor) -> Tensor:
    """The whole of what the tensor-parallel rank holds. A collective of the data-parallel axis for a `DTensor`."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
