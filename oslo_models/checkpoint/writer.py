"""Writes a sharded model: one file per rank (split) or the files of the full model (merged)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.checkpoint.atomic_commit import replace_atomically
from oslo_models.checkpoint.filenames import MANIFEST, MERGED, index_name, split_name, with_variant
from oslo_models.checkpoint.gather import gather_full_tensor
from oslo_models.checkpoint.manifest import sync_and_record, write_manifest
from oslo_models.checkpoint.serialization import SaveFunction, explain_write_errors, write_order, write_weights
from oslo_models.checkpoint.tensor_info import TensorInfo, TensorInfos, gather_infos, merge_stages
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class _File:
    """Plan of a weights file.

    Attributes:
        name: the file name.
        meta: its tensors, on the meta device.
        aliases: additional names of some tensors.
        elsewhere: tensors of this rank that another replica writes. FSDP may need all replicas to gather them.
    """

    name: str
    meta: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.meta.values())


@dataclass(frozen=True)
class _SavePlan:
    """The files of a save.

    Attributes:
        infos: the tensors in the files of this rank, without aliases if merged.
        files: the files of this rank. If merged, all ranks take part in them.
        is_writer: whether this rank writes the files.
        file_of: the file of each tensor and alias; only if merged.
        entries: the manifest entry of each tensor.
        kind: the manifest entries for the kind of checkpoint (split or merged) and its sizes.
    """

    infos: TensorInfos
    files: list[_File]
    is_writer: bool
    file_of: dict[str, str]
    entries: dict[str, dict[str, Any]]
    kind: dict[str, Any]


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
    separator: str = "=",
) -> None:
    """Write each rank's shards to a separate file or, if merging, the full model in the files of transformers.

    A collective of all ranks. When it returns on any rank, all files are on disk. When it raises, it raises on every
    rank, and ``directory`` has the old checkpoint (or, if only the last step failed, the complete new one).

    Merging gathers tensors on world rank 0 one at a time and writes each immediately, so no rank needs more memory than
    its shards and one full tensor. A tensor on several pipeline stages is taken from the first stage.

    Args:
        directory: the target directory. It need not exist.
        tensors: the local shards on this rank: plain tensors, or `DTensor` over the data-parallel axis.
        layouts: the sharding of each tensor over the tensor-parallel axis.
        mesh: the mesh of all ranks.
        merging: write the full model instead of one file per rank.
        tied: the source name of each tied weight, equal on every rank. ``.bin`` files have both names with shared
            memory. ``.safetensors`` files cannot share memory and have only the source.
        files: writes further files (``config.json``) into the directory passed to it. Called on world rank 0.
        metadata: further entries of the manifest (``architectures``, ``model_type``, ``dtype``).
        safe_serialization: ``True`` for ``.safetensors``, ``False`` for ``.bin``. Defaults to ``merging``.
        save_function: replaces `torch.save` for ``.bin`` files.
        max_shard_size: the maximum size of a merged file, as in transformers' ``save_pretrained``.
        variant: as in transformers' ``save_pretrained``.
        separator: the character before the numbers in the names of split files: ``"="``, or ``"_"`` as in OSLO 2.

    Raises:
        ValueError: a tensor does not have the local shape of its layout.
        OSError: the directory cannot be written or the disk is full.
    """
    world, safe = mesh.world, merging if safe_serialization is None else safe_serialization
    infos, stages = gather_infos(f"saving to {directory}", tensors, layouts, mesh, tied)
    if merging:
        plan = _plan_merged(*merge_stages(stages, tied), mesh, safe, max_shard_size, variant)
    else:
        plan = _plan_split(infos, stages, mesh, safe, separator)

    def fetch(name: str) -> Tensor | None:
        """Return the tensor on the CPU of the writing rank. A collective of all ranks with this tensor."""
        info = plan.infos[name]
        tensor = _without_fsdp(tensors[name]) if info.stage == mesh.pp.rank else None
        if merging:
            return gather_full_tensor(tensor, info.layout, info.dtype, info.stage, mesh)
        return tensor.cpu() if tensor is not None and plan.is_writer else None

    use_spool_file = merging and not safe
    sizes = [file.nbytes for file in plan.files] if plan.is_writer else []
    nbytes = sum(sizes) + use_spool_file * max(sizes, default=0)
    with replace_atomically(directory, world, nbytes, variant) as staging:
        own_records: dict[str, dict[str, int]] = {}
        for file in plan.files:
            own_records |= _write(
                staging / file.name, file, fetch, plan.is_writer, world, save_function, use_spool_file
            )
        gathered = gather_objects(world, own_records)
        with agree(world, f"writing {MANIFEST}"):
            if world.rank == 0:
                records = {name: record for report in gathered for name, record in report.items()}
                if len(plan.files) > 1:
                    path = staging / index_name(MERGED[not safe], variant)
                    records[path.name] = _write_index(path, plan)
                if files is not None:
                    files(staging)
                dtypes = [entry["dtype"] for entry in plan.entries.values() if "float" in entry["dtype"]]
                header = {"dtype": next(iter(dtypes), None), **(metadata or {}), **plan.kind, "variant": variant}
                content = {**header, "tied": dict(tied), "tensors": plan.entries, "files": records}
                write_manifest(staging / with_variant(MANIFEST, variant), content)


def _plan_split(
    infos: TensorInfos, stages: Sequence[TensorInfos], mesh: ParallelMesh, safe: bool, separator: str
) -> _SavePlan:
    """Plan one file with the shards of this rank."""
    aliases = {name: info.alias_of for name, info in infos.items() if info.alias_of is not None}
    meta = {
        name: _on_meta(info.layout.local_shape(mesh.rank_in(info.layout)), info.dtype)
        for name, info in infos.items()
        if name not in aliases
    }
    elsewhere = {
        name: tensor
        for name, tensor in meta.items()
        if mesh.copy_rank > 0 and not mesh.is_over_replicas(infos[name].layout)
    }
    meta = {name: tensor for name, tensor in meta.items() if name not in elsewhere}
    aliases = {alias: source for alias, source in aliases.items() if source in meta and not safe}
    file = _File(split_name(mesh.tp.rank, mesh.pp.rank, safe, separator, mesh.copy_rank), meta, aliases, elsewhere)
    entries: dict[str, dict[str, Any]] = {}
    for stage in stages:
        for name, info in stage.items():
            if not (safe and info.alias_of):
                sharding: dict[str, Any] = {"dim": info.layout.dim, "ranges": info.layout.ranges, "stages": []}
                if info.layout.first_ranges:
                    sharding["first_ranges"] = [first for (first,) in info.layout.first_ranges]
                entries.setdefault(name, {**_describe(info), **sharding})["stages"].append(info.stage)
    kind: dict[str, Any] = {"kind": "split", "tp": mesh.tp.size, "pp": mesh.pp.size}
    if mesh.tp.shares:
        kind["tp_shares"] = mesh.tp.shares
    holders = mesh.experts.size // mesh.tp.size
    if holders > 1:
        kind["expert_replicas"] = holders
    return _SavePlan(infos, [file], mesh.copy_rank < holders, {}, entries, kind)


def _plan_merged(
    infos: TensorInfos,
    aliases: Mapping[str, str],
    mesh: ParallelMesh,
    safe: bool,
    max_shard_size: int | str,
    variant: str | None,
) -> _SavePlan:
    """Plan the files of the full model."""
    aliases = {} if safe else aliases
    stem, suffix = with_variant(MERGED[not safe], variant).rsplit(".", 1)
    meta = {name: _on_meta(info.layout.shape, info.dtype) for name, info in infos.items()}
    pattern = f"{stem}{{suffix}}.{suffix}"
    shards = split_torch_state_dict_into_shards(meta, filename_pattern=pattern, max_shard_size=max_shard_size)
    file_of = dict(shards.tensor_to_filename)
    file_of |= {alias: file_of[source] for alias, source in aliases.items()}
    files = []
    for filename, names in shards.filename_to_tensors.items():
        own_aliases = {alias: source for alias, source in aliases.items() if source in names}
        files.append(_File(filename, {name: meta[name] for name in names}, own_aliases))
    entries = {name: {**_describe(info), "file": file_of[name]} for name, info in infos.items()}
    kind = {"kind": "merged", "tp": 1, "pp": 1}
    return _SavePlan(infos, files, mesh.world.rank == 0, file_of, entries, kind)


def _write_index(path: Path, plan: _SavePlan) -> dict[str, int]:
    """Write transformers' index of several merged files and return its record for the manifest."""
    count = sum(math.prod(info.layout.shape) for info in plan.infos.values())
    totals = {"total_parameters": count, "total_size": sum(file.nbytes for file in plan.files)}
    path.write_text(json.dumps({"metadata": totals, "weight_map": plan.file_of}, indent=2, sort_keys=True) + "\n")
    return sync_and_record(path)


def _write(
    path: Path,
    file: _File,
    fetch: Callable[[str], Tensor | None],
    is_writer: bool,
    world: Axis,
    save_function: SaveFunction | None,
    use_spool_file: bool,
) -> dict[str, dict[str, int]]:
    """Write one file. A collective of all ranks.

    Returns:
        Its record for the manifest, by file name; empty on ranks that do not write.
    """
    tensors: Iterator[Any] = (fetch(name) for name in write_order(file.meta))
    with agree(world, f"writing {path.name}"):
        try:
            if not is_writer:
                return {}
            with explain_write_errors(path, file.nbytes, world.rank):
                write_weights(path, file.meta, tensors, file.aliases, save_function, use_spool_file)
                return {path.name: sync_and_record(path)}
        finally:
            # non-writing and failed ranks still take part in the collectives of `fetch`
            for _ in chain(tensors, map(fetch, write_order(file.elsewhere))):
                pass


def _describe(info: TensorInfo) -> dict[str, Any]:
    return {"shape": info.layout.shape, "dtype": str(info.dtype).removeprefix("torch.")}


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _without_fsdp(tensor: Tensor) -> Tensor:
    """Return the local tensor-parallel shard. With FSDP, gather it from the replicas, a collective."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else local_tensor(tensor).detach()
