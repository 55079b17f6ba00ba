"""Describes local shards to ``torch.distributed.checkpoint`` as chunks of a full tensor, one per range of a layout.

These functions implement torch's protocol for tensor subclasses (``torch.distributed._checkpointable``). They import
the checkpoint package lazily, since its import is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.sharding.layout import Index, Layout


def write_items(name: str, local: Tensor, layout: Layout, rank: int) -> list[Any]:
    """Return a ``WriteItem`` for each chunk of the tensor ``name`` on this rank."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties, size = TensorProperties.create_from_tensor(local), torch.Size(layout.shape)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(_offsets(there)), number),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(there), properties=properties, size=size),
        )
        for number, (there, _) in enumerate(layout.shard_indices(rank))
    ]


def chunks(layout: Layout, rank: int) -> list[Any]:
    """Return the ``ChunkStorageMetadata`` of each chunk that this rank loads."""
    return [_chunk(there) for there, _ in layout.shard_indices(rank)]


def values_of(index: Any, local: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the view of ``local`` at the chunk of a ``MetadataIndex``.

    Raises:
        ValueError: this rank has no such chunk.
    """
    for there, here in layout.shard_indices(rank):
        if index.offset is None or tuple(index.offset) == _offsets(there):
            return local[here]
    raise ValueError(f"rank {rank} of {layout} has no chunk at offset {tuple(index.offset)}")


def _chunk(there: Index) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    sizes = torch.Size(index.stop - index.start for index in there)
    return ChunkStorageMetadata(offsets=torch.Size(_offsets(there)), sizes=sizes)


def _offsets(there: Index) -> tuple[int, ...]:
    return tuple(index.start for index in there)
