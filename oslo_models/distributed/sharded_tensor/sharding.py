"""`Sharding`: which part of a full tensor a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.sharding.layout import Layout, Range


@dataclass(frozen=True)
class Sharding:
    """Sharding of a tensor: its full tensor, layout and mesh.

    Attributes:
        name: the name of the parameter in the full model.
        layout: its layout over the tp axis.
        mesh: the axes of the model.
        counts: whether norms count the copy on this pipeline stage. Tied weights have copies on several stages.
    """

    name: str
    layout: Layout
    mesh: ParallelMesh
    counts: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self  # a copied model is on the same ranks

    def __str__(self) -> str:
        tp, dim = self.mesh.tp, self.layout.dim
        if dim is None:
            return f"{self.name}, replicated, tensor-parallel rank {tp.rank} of {tp.size}"
        rank = self.mesh.rank_in(self.layout)
        held, shape = format_ranges(self.layout.ranges[rank]), tuple(self.layout.shape)
        if self.layout.first_ranges:
            held = f"{format_ranges(self.layout.first_ranges[rank])} of dimension 0 and {held}"
        return f"{self.name}, {held} of dimension {dim} of {shape}, {self.axis.name} rank {rank} of {self.axis.size}"

    @property
    def axis(self) -> Axis:
        """The ranks over which the tensor is sharded."""
        return self.mesh.experts if self.is_over_replicas else self.mesh.tp

    @property
    def is_over_replicas(self) -> bool:
        """Whether the ranks of `axis` belong to several data-parallel replicas, as they may for experts."""
        return self.mesh.is_over_replicas(self.layout)

    @property
    def replicas(self) -> Axis:
        """The ranks with the same shard."""
        return self.mesh.expert_replicas if self.is_over_replicas else self.mesh.dp

    @property
    def is_part(self) -> bool:
        """Whether this rank holds less than the full tensor."""
        return self.layout.dim is not None and self.axis.size > 1

    def counted(self, local: Tensor) -> list[Tensor]:
        """Return the slices that this rank contributes to a norm. Each element of the full tensor counts once."""
        owned = self.layout.owned_indices(self.axis.rank) if self.counts else []
        return [local[here] for _, here in owned]


def format_ranges(ranges: Sequence[Range]) -> str:
    return " and ".join(f"{start}:{stop}" for start, stop in ranges)
