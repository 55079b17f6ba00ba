"""Gathers the shards of a tensor on world rank 0, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.collectives import receive, send
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.sharding.layout import Index, Layout

_BLOCK = 8 << 20
"""Bytes per message."""


def gather_full_tensor(
    tensor: Tensor | None, layout: Layout, dtype: torch.dtype, stage: int, mesh: ParallelMesh
) -> Tensor | None:
    """Gather a tensor on the CPU of world rank 0.

    This is a collective of the first ranks that hold one copy of the weights, and of all ranks with different experts.
    Shards are sent in blocks. Rank 0 needs memory for the full tensor and one block, the other ranks for one block.

    Args:
        tensor: this rank's shard; ``None`` on other pipeline stages.
        layout: how the tensor is sharded over the tensor-parallel ranks.
        dtype: its dtype; required because ranks of other pipeline stages have no shard.
        stage: the pipeline stage that holds the shards.

    Returns:
        The full tensor on world rank 0, ``None`` on other ranks.
    """
    device, tp, rank_in_layout = _transfer_device(mesh), mesh.tp, mesh.rank_in(layout)
    if mesh.is_over_replicas(layout):
        axis, first = mesh.world, stage * mesh.dp.size * mesh.cp.size * tp.size
        senders = [first + rank for rank in range(mesh.experts.size)]
    elif mesh.dp.rank != 0 or mesh.cp.rank != 0:
        return None
    else:
        axis = mesh.weights
        senders = [stage * tp.size + rank for rank in range(1 if layout.dim is None else tp.size)]
    if axis.rank != 0:
        if axis.rank in senders:
            assert tensor is not None
            for block in _blocks(tensor, [here for _, here in layout.shard_indices(rank_in_layout)]):
                data = block.to(device).contiguous().view(-1)
                send(axis, data.view(torch.uint8), 0, slow=True)
        return None
    if senders == [0]:
        assert tensor is not None
        return tensor.cpu()
    full = torch.empty(layout.shape, dtype=dtype)
    for rank, sender in enumerate(senders):
        if sender == 0:
            assert tensor is not None
            layout.write_shard(full, tensor, 0)
            continue
        blocks = [*_blocks(full, [there for there, _ in layout.shard_indices(rank)])]
        buffer = torch.empty(max((block.nbytes for block in blocks), default=0), dtype=torch.uint8, device=device)
        for block in blocks:
            data = receive(axis, buffer[: block.nbytes], sender, slow=True)
            block.copy_(data.view(dtype).view(block.shape))
    return full


def _blocks(tensor: Tensor, indices: Iterable[Index]) -> Iterator[Tensor]:
    """Yield views of ``tensor`` at these indices, in blocks of at most `_BLOCK` bytes (at least one row)."""
    for index in indices:
        view = torch.atleast_1d(tensor[index])
        if view.numel():
            yield from view.split(max(1, _BLOCK // view[0].nbytes))


def _transfer_device(mesh: ParallelMesh) -> torch.device:
    """Return the CPU if the process group has a CPU backend, which saves GPU memory; the GPU otherwise."""
    has_cpu_backend = mesh.weights.group is None or "cpu:" in str(dist.get_backend_config(mesh.weights.group))
    return torch.device("cpu") if has_cpu_backend else mesh.device
