"""Refuses to allocate a part of a model that exceeds the free memory of its device, and names sizes that fit."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Callable

import torch

from oslo_models.distributed.devices import free_memory
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.modeling.weight_mapping import WeightMapping
from oslo_models.sharding.layout import Layout

GIB = 1 << 30
_MOST_RANKS = 64
"""Sizes to try for the message."""


def check_memory(name: str, mesh: ParallelMesh, needed: int, mapping: Callable[[], WeightMapping]) -> None:
    """Raise ``MemoryError`` on every rank if the weights of some rank do not fit. This is a collective of all ranks.

    Args:
        name: the class of the model.
        needed: bytes of the weights on this rank.
        mapping: returns the names and layouts, for the message.
    """
    device = mesh.device
    own = (socket.gethostname(), str(device), needed, free_memory(device))
    ranks = gather_objects(mesh.world, own)
    together: Counter[tuple[str, str]] = Counter()
    for host, where, size, _ in ranks:
        together[host, where] += size
    for rank, (host, where, size, free) in enumerate(ranks):
        total = together[host, where]
        if free is None or total <= free:
            continue
        sharing = f" ({total / GIB:.1f} GiB with the other ranks there)" if total > size else ""
        raise MemoryError(
            f"the weights of rank {rank} of {name} take {size / GIB:.1f} GiB{sharing}, and {where} on {host} has "
            f"{free / GIB:.1f} GiB free: {_remedy(mapping(), mesh, free, total > size)}"
        )


def bytes_on_rank(mapping: WeightMapping, mesh: ParallelMesh, dtype: torch.dtype | None) -> int:
    """Return the bytes of the weights on this rank."""
    return _bytes(mapping, mapping.layouts, dtype, mesh.rank_in)


def _bytes(
    mapping: WeightMapping, layouts: dict[str, Layout], dtype: torch.dtype | None, rank: Callable[[Layout], int]
) -> int:
    tied = mapping.model.all_tied_weights_keys
    names = {tied.get(name, name) for name in mapping.names.values()}
    total = 0
    for name in names:
        tensor = mapping.state[name]
        layout = layouts.get(name, Layout(tuple(tensor.shape)))
        size = (dtype or tensor.dtype).itemsize if tensor.is_floating_point() else tensor.dtype.itemsize
        total += math.prod(layout.local_shape(rank(layout))) * size
    return total


def _remedy(mapping: WeightMapping, mesh: ParallelMesh, free: int, is_shared: bool) -> str:
    """Return the smallest number of ranks that fits, or other remedies."""
    smaller = "load fewer bits (dtype, or quantization_config with load_in_4bit)"
    if is_shared or mesh.device.type == "cpu":
        return f"use further machines, or {smaller}"
    for n in range(mesh.tp.size + 1, _MOST_RANKS + 1):
        if not (layouts := mapping.layouts_over(n)):
            break
        size = _bytes(mapping, layouts, mapping.model.dtype, lambda _: 0)  # the first rank has the largest part
        if size <= free:
            return f"use tensor_parallel_size={n} ({size / GIB:.1f} GiB on the fullest rank), or {smaller}"
    return f"use pipeline_parallel_size={mesh.pp.size * 2} or more, or {smaller}"
