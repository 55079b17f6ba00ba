"""What the ranks hold: gathered before anything is written, so that all plan the same files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class TensorRecord:
    """What a stage says of one of its tensors."""

    layout: Layout
    dtype: torch.dtype
    stage: int
    alias_of: str | None


Table = dict[str, TensorRecord]


def gather_tables(
    doing: str,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: ParallelMesh,
    tied: Mapping[str, str],
) -> tuple[Table, list[Table]]:
    """What this rank holds, and what each stage holds. A collective of all ranks.

    Raises:
        ValueError: on every rank, when a tensor does not have the shape that its layout gives the rank.
    """
    table: Table = {}
    originals: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: name in tied):  # on a stage without it, another of its names stands in
        originals.setdefault(tied.get(name, name), name)
    with agree(mesh.world, doing):
        for name, tensor in tensors.items():
            if name not in layouts or tuple(tensor.shape) != layouts[name].local_shape(mesh.tp.rank):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which is not a part of {layouts.get(name)}")
            original = originals[tied.get(name, name)]
            shares = original != name and _same_memory(tensor, tensors[original])
            table[name] = TensorRecord(layouts[name], tensor.dtype, mesh.pp.rank, original if shares else None)
    stages = gather_objects(mesh.world, table if mesh.tp.rank == mesh.dp.rank == 0 else {})
    return table, [stage for stage in stages if stage]


def merge_tables(stages: Sequence[Table], tied: Mapping[str, str]) -> tuple[Table, dict[str, str]]:
    """Of each tensor the entry of the first stage that has it, and which names are aliases of others."""
    merged: Table = {}
    for table in stages:
        merged |= {name: entry for name, entry in table.items() if name not in merged}
    aliases = {}
    for name, entry in merged.items():
        original = tied.get(name)
        # On one stage the memory tells whether two are still tied; across stages only their names can.
        if original in merged and (entry.alias_of is not None or merged[original].stage != entry.stage):
            aliases[name] = original
    return {name: entry for name, entry in merged.items() if name not in aliases}, aliases


def _same_memory(a: Tensor, b: Tensor) -> bool:
    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (a, b))
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype
