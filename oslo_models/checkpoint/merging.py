"""Puts the parts of a tensor together on world rank 0, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.collectives import receive, send
from oslo_models.layout import Layout
from oslo_models.mesh import ParallelMesh

_BLOCK = 8 << 20


def collect(tensor: Tensor | None, layout: Layout, dtype: torch.dtype, stage: int, mesh: ParallelMesh) -> Tensor | None:
    """The full tensor on the CPU of world rank 0, ``None`` elsewhere. A collective of the first model replica.

    Besides the full tensor no rank needs more than a block of memory.

    Args:
        tensor: this rank's part, if it has one.
        stage: the pipeline stage whose ranks send their parts.
    """
    axis = mesh.model
    if mesh.dp.rank != 0:
        return None
    holders = [stage * mesh.tp.size + rank for rank in range(1 if layout.dim is None else mesh.tp.size)]
    if axis.rank != 0:
        if axis.rank in holders and tensor is not None:
            for rows, _ in _blocks(layout, mesh.tp.rank, dtype):
                send(axis, _rows(tensor)[rows].to(_wire(mesh)).contiguous().reshape(-1).view(torch.uint8), 0)
        return None
    if holders == [0] and tensor is not None:
        return tensor.cpu()
    full = torch.empty(layout.shape, dtype=dtype)
    for rank, holder in enumerate(holders):
        if holder == 0 and tensor is not None:
            layout.place(full, tensor, 0)
            continue
        for rows, place in _blocks(layout, rank, dtype):
            shape = (rows.stop - rows.start, *layout.local_shape(rank)[1:])
            block = torch.empty(shape, dtype=dtype, device=_wire(mesh))
            receive(axis, block.reshape(-1).view(torch.uint8), holder)
            if layout.dim:
                layout.place(full[place], block, rank)
            else:
                _rows(full)[place].copy_(block)
    return full


def _blocks(layout: Layout, rank: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice]]:
    """Runs of rows of a rank's part, small enough to be sent, and the rows of the full tensor where they belong."""
    shape = layout.local_shape(rank) or (1,)
    height = max(1, _BLOCK // max(1, dtype.itemsize * math.prod(shape[1:])))
    runs = layout.ranges[rank] if layout.dim == 0 else ((0, shape[0]),)
    local = 0
    for start, stop in runs if math.prod(shape) else ():
        for first in range(start, stop, height):
            count = min(height, stop - first)
            yield slice(local, local + count), slice(first, first + count)
            local += count


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _wire(mesh: ParallelMesh) -> torch.device:
    """Where tensors travel: through the CPU if the process group can, so that no memory of a GPU is needed."""
    through_cpu = mesh.model.group is None or "cpu:" in str(dist.get_backend_config(mesh.model.group))
    return torch.device("cpu") if through_cpu else mesh.device
