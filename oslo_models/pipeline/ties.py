"""Detects tied weights with different values on the stages, such as the separate head of an adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.pipeline.stage import Stage


def untie_different(stage: Stage, parameters: Mapping[str, Tensor], mesh: ParallelMesh) -> bool:
    """Remove ties from ``stage`` between weights that are not equal. A collective of all ranks.

    Args:
        parameters: parameters of this rank. Tied parameters occur under each of their names.

    Returns:
        Whether ties were removed.
    """
    names = {*stage.tied_names, *stage.tied_names.values()}
    if not names:
        return False
    full_names = {stage.full_names.get(name, name): param for name, param in parameters.items()}
    own = {name: _digest(param) for name, param in full_names.items() if name in names}
    stages: dict[str, set[int]] = {}
    values: dict[str, dict[tuple[int, int], set[str]]] = {}
    for index, position, digests in gather_objects(mesh.world, (mesh.pp.rank, (mesh.dp.rank, mesh.tp.rank), own)):
        for name, digest in digests.items():
            stages.setdefault(name, set()).add(index)
            values.setdefault(name, {}).setdefault(position, set()).add(digest)
    groups: dict[str, list[str]] = {}
    for name in sorted(values, key=lambda name: name in stage.tied_names):  # canonical names come first
        groups.setdefault(stage.tied_names.get(name, name), []).append(name)
    found = False
    for canonical, members in groups.items():
        different = [name for name in members[1:] if not _are_equal(values[members[0]], values[name])]
        found = found or bool(different)
        for name in different:
            stage.tied_names.pop(name, None)
            _set_holders(stage, name, stages[name])
        if different:
            _set_holders(stage, canonical, set().union(*(stages[name] for name in members if name not in different)))
    return found


def _set_holders(stage: Stage, name: str, stages: Iterable[int]) -> None:
    """Record the stages that hold a parameter."""
    holders = tuple(sorted(stages))
    stage.shared_parameters.pop(name, None)
    if len(holders) > 1:
        stage.shared_parameters[name] = holders


def _are_equal(one: Mapping[tuple[int, int], set[str]], other: Mapping[tuple[int, int], set[str]]) -> bool:
    """Return whether two weights have one value at each position of the ranks within a stage."""
    return all(len(one.get(position, set()) | other.get(position, set())) == 1 for position in {*one, *other})


def _digest(x: Tensor) -> str:
    """Return the SHA-256 of dtype, shape and elements of the local shard."""
    x = x.to_local().detach() if isinstance(x, DTensor) else local_tensor(x)
    digest = hashlib.sha256(f"{x.dtype} {tuple(x.shape)}".encode())
    digest.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
