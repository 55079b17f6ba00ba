"""Normalisations inside divided regions: put in front of the class of a norm, whatever that is."""

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
    """A norm of each head by itself. Ranks apply copies of one weight to different heads: its gradients are summed."""

    tp: Axis
    layouts: dict[str, Layout]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        for name, param in self._parameters.items():
            if param is not None and (self.layouts[name].dim is None or self.layouts[name].overlaps):
                # found before the parameter
                own[name] = SumReplicatedGrad.apply(getattr(self, name), self.tp, self.layouts[name])
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self._parameters:
                own.pop(name, None)


class WidthParallelNorm(HeadParallelNorm):
    """A root-mean-square norm over a divided width. Input and output ``[..., local width]``.

    A rank's norm divides by the root of its own mean square; what that is off by from the root over the whole width is
    one number per token, for which the squares that no earlier rank has are summed over the ranks.
    """

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layouts["weight"]
        eps = next(getattr(self, name) for name in ("variance_epsilon", "eps") if hasattr(self, name))
        squares = x.float().pow(2)
        parts = [squares[..., here[0]].sum(-1, keepdim=True) for _, here in layout.owned(self.tp.rank)]
        own = torch.stack(parts).sum(0) if parts else squares.sum(-1, keepdim=True) * 0
        mean = copy_to(self.tp, reduce_from(self.tp, own)) / layout.shape[0]
        scale = ((squares.mean(-1, keepdim=True) + eps) / (mean + eps)).sqrt()
        return (super().forward(x) * scale).to(x.dtype)


class HeadParallelNorms(nn.Module):
    """A layer norm of its own for each head. Input and output ``[rows, local heads, positions, width]``.

    Every rank holds all of them; a rank's gradients are zero but for those of its heads, and summed over the ranks.
    """

    tp: Axis
    heads: EvenSplit
    norms: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        start, stop = self.heads.counts(self.tp.size)[self.tp.rank]
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
