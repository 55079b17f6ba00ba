"""Normalizations inside sharded regions, as mixins before the norm's own class."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.linear import SumReplicatedGrad
from oslo_models.sharding.layout import EvenSplit, Layout


class HeadParallelNorm(nn.Module):
    """A norm of each head by itself. Ranks apply one weight to different heads, so its gradients are summed."""

    tp: Axis
    layouts: dict[str, Layout]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        for name, param in self._parameters.items():
            if param is not None and (self.layouts[name].dim is None or self.layouts[name].overlaps):
                # hides the parameter of this name
                attributes[name] = SumReplicatedGrad.apply(getattr(self, name), self.tp, self.layouts[name])
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self._parameters:
                attributes.pop(name, None)


class WidthParallelNorm(HeadParallelNorm):
    """An RMS norm over all features of a sharded activation. Input and output ``[..., local width]``.

    The norm's own forward divides by the local root mean square. One factor per token corrects this to the root mean
    square over the full width, for which the squares of features that no earlier rank holds are summed over the ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layouts["weight"]
        eps = next(getattr(self, name) for name in ("variance_epsilon", "eps") if hasattr(self, name))
        squares = x.float().pow(2)
        parts = [squares[..., index[0]].sum(-1, keepdim=True) for _, index in layout.owned_indices(self.tp.rank)]
        owned = torch.stack(parts).sum(0) if parts else squares.sum(-1, keepdim=True) * 0
        mean = copy_to(self.tp, reduce_from(self.tp, owned)) / layout.shape[0]
        scale = ((squares.mean(-1, keepdim=True) + eps) / (mean + eps)).sqrt()
        return (super().forward(x) * scale).to(x.dtype)


class HeadParallelNorms(nn.Module):
    """A separate layer norm for each head. Input and output ``[rows, local heads, positions, width]``.

    Every rank holds all norms. Its gradients are zero except for its own heads, and are summed over the ranks.
    """

    tp: Axis
    heads: EvenSplit
    norms: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        start, stop = self.heads.unit_ranges(self.tp.size)[self.tp.rank]
        norms: list[Any] = list(self.norms)
        leaves = [[getattr(norm, leaf) for norm in norms] for leaf in ("weight", "bias")]
        weights, biases = (None if params[0] is None else torch.stack(params) for params in leaves)
        if weights is not None:
            weights = copy_to(self.tp, weights)[start:stop, None]
        if biases is not None:
            biases = copy_to(self.tp, biases)[start:stop, None]
        normed = F.layer_norm(x, x.shape[-1:], eps=norms[0].eps)
        scaled = normed if weights is None else normed * weights
        return scaled if biases is None else scaled + biases
