"""State-space mixers, sharded over their heads.

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
    """Mixin before a mixer class. The mixer's forward reads the parameters of its convolution directly.

    Attributes:
        scales: name of a buffer with a factor for each output of ``in_proj``, or ``""``. The buffer stays full, since
            transformers recomputes it whenever a model is created.
        scaled: layout of the weight of ``in_proj``.
    """

    scales: str
    scaled: Layout

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        if self.scales:
            own = self.scaled.ranges[self.tp.rank]
            vars(self)[self.scales] = torch.cat([getattr(self, self.scales)[..., a:b] for a, b in own], -1)
        # The training kernel would also apply the norm and the output projection, without an all-reduce.
        self.training = training and self.tp.size == 1
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training
            vars(self).pop(self.scales, None)


class RecurrentStateModule(nn.Module):
    """Mixin before a recurrent mixer. Passes the states of the local heads to the mixer.

    States keep transformers' shapes, with entries for all heads. A rank reads and writes the entries of its local
    heads.

    Attributes:
        heads: split of the heads, of width 1.
        replicated: number of leading states that every rank reads and writes in full.
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
        if new is not own:  # new tensors instead of in-place writes
            for before, after in zip(own, new, strict=True):
                before.copy_(after)
        return output, state
