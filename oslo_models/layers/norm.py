"""Normalisations inside divided regions: put in front of the class of a norm, whatever that is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.collectives import copy_to, reduce_from
from oslo_models.layers.linear import SumCopies
from oslo_models.layout import Layout
from oslo_models.mesh import Axis


class HeadParallelNorm(nn.Module):
    """A norm of each head by itself. Ranks apply copies of one weight to different heads: its gradients are summed."""

    tp: Axis
    layouts: dict[str, Layout]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        for name, param in self._parameters.items():
            if param is not None and (self.layouts[name].dim is None or self.layouts[name].overlaps):
                own[name] = SumCopies.apply(param, self.tp, self.layouts[name])  # found before the parameter
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
