"""Puts the parts of a tensor together on world rank 0, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.collectives import receive, send
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.sharding.layout import Index, Layout

_BLOCK = 8 << 20


def collect(tensor: Tensor | None, layout: Layout, dtype: torch.dtype, stage: int, mesh: ParallelMesh) -> Tensor | None:
    """The full tensor on the CPU of world rank 0, ``None`` elsewhere. A collective of the first model replica.

    Besides the full tensor no rank needs more than a block of memory.

    Args:
        tensor: this rank's part, if it has one.
        stage: the pipeline stage whose ranks send their parts.
    """
    if mesh.dp.rank != 0:
        return None
    axis, wire, tp = mesh.model, _wire(mesh), mesh.tp
    holders = [stage * tp.size + rank for rank in range(1 if layout.dim is None else tp.size)]
    if axis.rank != 0:
        if axis.rank in holders:
            assert tensor is not None
            for block in _blocks(tensor, [here for _, here in layout.places(tp.rank)]):
                data = block.to(wire).contiguous().view(-1)
                send(axis, data.view(torch.uint8), 0, slow=True)
        return None
    if holders == [0]:
        assert tensor is not None
        return tensor.cpu()
    full = torch.empty(layout.shape, dtype=dtype)
    for rank, holder in enumerate(holders):
        if holder == 0:
            assert tensor is not None
            layout.place(full, tensor, 0)
            continue
        blocks = [*_blocks(full, [there for there, _ in layout.places(rank)])]
        buffer = torch.empty(max((block.nbytes for block in blocks), default=0), dtype=torch.uint8, device=wire)
        for block in blocks:
            data = receive(axis, buffer[: block.nbytes], holder, slow=True)
            block.copy_(data.view(dtype).view(block.shape))
    return full


def _blocks(tensor: Tensor, places: Iterable[Index]) -> Iterator[Tensor]:
    """Views of ``tensor`` at these places, small enough to be sent."""
    for place in places:
        part = torch.atleast_1d(tensor[place])
        if part.numel():
            yield from part.split(max(1, _BLOCK // part[0].nbytes))


def _wire(mesh: ParallelMesh) -> torch.device:
    """Where tensors travel: through the CPU if the process group can, so that no memory of a GPU is needed."""
    through_cpu = mesh.model.group is None or "cpu:" in str(dist.get_backend_config(mesh.model.group))
    return torch.device("cpu") if through_cpu else mesh.device
