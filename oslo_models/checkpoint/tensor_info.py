"""Describes the tensors of every rank. Ranks gather the descriptions before a save, so that all plan the same files."""

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
class TensorInfo:
    """A tensor of one pipeline stage, without its data.

    Attributes:
        layout: the sharding over the tensor-parallel ranks.
        dtype: the dtype.
        stage: the pipeline stage.
        alias_of: the name of another tensor of the stage with the same memory.
    """

    layout: Layout
    dtype: torch.dtype
    stage: int
    alias_of: str | None


TensorInfos = dict[str, TensorInfo]
"""Tensors by name."""


def gather_infos(
    doing: str,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout],
    mesh: ParallelMesh,
    tied: Mapping[str, str],
) -> tuple[TensorInfos, list[TensorInfos]]:
    """Describe the tensors of this rank and of each pipeline stage. A collective of all ranks.

    Args:
        doing: the current operation, for error messages: ``"saving to /path"``.
        tensors: the local shards on this rank.
        layouts: the sharding of each tensor over the tensor-parallel ranks.
        mesh: the mesh of all ranks.
        tied: the name of the source of each tied weight.

    Returns:
        The tensors of this rank, and a list with the tensors of each pipeline stage.

    Raises:
        ValueError: on every rank, if a tensor does not have the local shape of its layout.
    """
    infos: TensorInfos = {}
    sources: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: name in tied):  # the source first, else a tied name
        sources.setdefault(tied.get(name, name), name)
    with agree(mesh.world, doing):
        for name, tensor in tensors.items():
            if name not in layouts or tuple(tensor.shape) != layouts[name].local_shape(mesh.rank_in(layouts[name])):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which is not a part of {layouts.get(name)}")
            source = sources[tied.get(name, name)]
            is_alias = source != name and _same_memory(tensor, tensors[source])
            infos[name] = TensorInfo(layouts[name], tensor.dtype, mesh.pp.rank, source if is_alias else None)
    stages = gather_objects(mesh.world, infos if mesh.tp.rank == mesh.cp.rank == mesh.dp.rank == 0 else {})
    return infos, [stage for stage in stages if stage]


def merge_stages(stages: Sequence[TensorInfos], tied: Mapping[str, str]) -> tuple[TensorInfos, dict[str, str]]:
    """Merge the tensors of all pipeline stages. A tensor on several stages is taken from the first.

    Returns:
        The tensors without aliases, and the source name of each alias.
    """
    merged: TensorInfos = {}
    for infos in stages:
        merged |= {name: info for name, info in infos.items() if name not in merged}
    aliases = {}
    for name, info in merged.items():
        source = tied.get(name)
        # Tied weights on one stage share memory, unless they were untied. Across stages only names identify them.
        if source in merged and (info.alias_of is not None or merged[source].stage != info.stage):
            aliases[name] = source
    return {name: info for name, info in merged.items() if name not in aliases}, aliases


def _same_memory(a: Tensor, b: Tensor) -> bool:
    a, b = (x.to_local() if isinstance(x, DTensor) else x for x in (a, b))
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype
