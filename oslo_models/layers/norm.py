"""Norms inside sharded regions, as mixins before the class of the norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.sharding.entry import Norm
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class HeadNorm(Norm):
    """Norm of each attention head by itself, applied to the local heads.

    Args:
        split: assigns the rows of the weight to heads. Without it, all heads share the full weight, and its gradient
            is all-reduced.
    """

    split: EvenSplit | None = None

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if self.split is None else Layout.sharded(shape, 0, (self.split,), n)


@dataclass(frozen=True)
class WidthNorm(HeadNorm):
    """RMS norm or layer norm over a sharded dimension. Means are taken over all ranks."""


@dataclass(frozen=True)
class GroupWidthNorm(HeadNorm):
    """RMS norm of each group of heads, with an optional gate on its input. See `StateSpace`.

    If several ranks hold parts of a group, the mean is taken over these ranks.

    Args:
        groups: the number of groups.
    """

    groups: int = 1


@shards(HeadNorm)
class HeadParallelNorm(ShardedModule):
    """Norm of each head by itself. Ranks apply one weight to different heads, so its gradient is all-reduced."""

    def is_shared(self, name: str) -> bool:
        """Return whether other ranks apply elements of this parameter, too."""
        return self._parameters[name] is not None and (
            self.layouts[name].dim is None or bool(self.layouts[name].overlaps)
        )

    def with_summed_grad(self, name: str) -> Any:
        """Return a parameter. Its gradient is summed over the ranks that apply the same elements."""
        param = getattr(self, name)
        return SumReplicatedGrad.apply(param, self.tp, self.layouts[name]) if self.is_shared(name) else param

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        for name in self._parameters:
            if self.is_shared(name):
                attributes[name] = self.with_summed_grad(name)  # hides the parameter of this name
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self._parameters:
                attributes.pop(name, None)


@shards(WidthNorm)
class WidthParallelNorm(HeadParallelNorm):
    """Norm over all features of a sharded activation. Input and output are ``[..., local width]``.

    The original forward of an RMS norm divides by the local root mean square. One factor per token corrects this to the
    root mean square over the full width.
    """

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self, nn.LayerNorm):
            centred = x.float() - self._mean(x.float())
            weight, bias = (self.with_summed_grad(name) for name in ("weight", "bias"))
            normed = centred * (self._mean(centred.pow(2)) + self.eps).rsqrt() * weight
            return (normed if bias is None else normed + bias).to(x.dtype)
        eps = next(getattr(self, name) for name in ("variance_epsilon", "eps") if hasattr(self, name))
        squares = x.float().pow(2)
        scale = ((squares.mean(-1, keepdim=True) + eps) / (self._mean(squares) + eps)).sqrt()
        return (super().forward(x) * scale).to(x.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean over all ranks. Features on several ranks count on the first rank only."""
        layout = self.layouts["weight"]
        parts = [x[..., index[0]].sum(-1, keepdim=True) for _, index in layout.owned_indices(self.tp.rank)]
        owned = torch.stack(parts).sum(0) if parts else x.sum(-1, keepdim=True) * 0
        return copy_to(self.tp, reduce_from(self.tp, owned)) / layout.shape[0]


@shards(GroupWidthNorm)
class GroupParallelNorm(HeadParallelNorm):
    """RMS norm of each group of features of a sharded activation ``[..., local width]``, gated before or after.

    As in `WidthParallelNorm`, one factor per token corrects the norm over the local part of a group.

    Attributes:
        group: number of the local group if it is on several ranks, else ``None``.
        groups: number of all groups.
    """

    group: int | None
    groups: int
    variance_epsilon: float

    def configure(self, entry: GroupWidthNorm, context: ShardingContext) -> None:
        super().configure(entry, context)
        layout = self.layouts["weight"]
        in_groups = hasattr(self, "group_size") or hasattr(
            self, "n_groups"
        )  # not so Mamba-2's before transformers 5.24
        groups = entry.groups if in_groups else 1
        ((start, stop),) = layout.ranges[self.tp.rank]
        full = layout.shape[0] // groups
        self.groups, self.group = groups, start // full if self.tp.size > groups else None
        if hasattr(self, "group_size"):
            self.group_size = min(full, stop - start)
        if hasattr(self, "n_groups"):
            self.n_groups = max((stop - start) // full, 1)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        output: Tensor = super().forward(x, gate)
        if self.group is None:
            return output
        gated = x if gate is None or getattr(self, "norm_before_gate", False) else x.float() * F.silu(gate.float())
        squares, eps = gated.float().pow(2), self.variance_epsilon
        sums = squares.new_zeros(*x.shape[:-1], self.groups)
        sums[..., self.group] = squares.sum(-1)
        sums = copy_to(self.tp, reduce_from(self.tp, sums))
        mean = sums[..., self.group, None] * self.groups / self.layouts["weight"].shape[0]
        scale = ((squares.mean(-1, keepdim=True) + eps) / (mean + eps)).sqrt()
        return (output * scale).to(output.dtype)
