"""State-space mixers with a part of their heads on each rank.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 8.1 (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.distributed.mesh import Axis
from oslo_models.layers.short_convolution import ShortConvolutionModule
from oslo_models.sharding.layout import EvenSplit, Layout


class StateSpaceModule(ShortConvolutionModule):
    """Mixed in before a mixer's class, whose forward uses the parameters of its convolution itself.

    Attributes:
        scales: the name of a buffer with a factor for each output of ``in_proj``, or ``""``. It stays full, since
            transformers computes it anew whenever a model is made.
        scaled: the layout of the weight of ``in_proj``.
    """

    scales: str
    scaled: Layout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        if self.scales:
            own = self.scaled.ranges[self.tp.rank]
            vars(self)[self.scales] = torch.cat([getattr(self, self.scales)[..., a:b] for a, b in own], -1)
        # A kernel for training would apply the norm and the output projection too, and sum over no ranks.
        self.training = training and self.tp.size == 1
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training
            vars(self).pop(self.scales, None)


class RecurrentStateModule(nn.Module):
    """Mixed in before a recurrent mixer that is called with states of all heads: it sees those of this rank.

    States keep the shapes that transformers gives them; a rank reads and writes the entries of its own heads.

    Attributes:
        heads: the heads, of width 1.
        replicated: the number of the first states that every rank reads and writes in full.
    """

    tp: Axis
    heads: EvenSplit
    replicated: int

    def forward(self, hidden: Tensor, state: Sequence[Tensor] | None = None, **kwargs: Any) -> Any:
        if state is None:
            return super().forward(hidden, None, **kwargs)
        start, stop = self.heads.ranges(self.tp.size)[self.tp.rank]
        own = [*state[: self.replicated], *(each[:, start:stop] for each in state[self.replicated :])]
        output, new = super().forward(hidden, own, **kwargs)
        if new is not own:  # made anew, rather than written in place
            for before, after in zip(own, new, strict=True):
                before.copy_(after)
        return output, state
