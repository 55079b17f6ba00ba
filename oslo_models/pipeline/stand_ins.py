"""Modules that take the place of those of other pipeline stages."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class PassOn(nn.Identity):
    """Stands in for a module of another stage. transformers' initialisation asks some of them for their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.bias = torch.empty(0)


class Received(PassOn):
    """Stands in for an embedding: hands out once what was received; what else is looked up adds nothing.

    Args:
        width: that of an embedding of words, by which some models lengthen what they embedded already.
    """

    hidden: Tensor | None = None

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is not None:  # no leaf of the graph: its readers can share a copy of it, or work in place
            return hidden.clone()
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        shape = () if given is None or self.width is None else (*given.shape, self.width)
        return torch.zeros(shape, dtype=self.weight.dtype, device=None if given is None else given.device)


class OfAnotherStage(nn.Module):
    """A module that embeds images or sounds, on a stage that is not its: zeros in the shapes of what it would give.

    Its weights are on the meta device, where it runs as it is: masks are made from these shapes, whatever it computes.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with torch.no_grad():
            made = super().forward(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), made)


@cache
def of_another_stage(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` on a stage that is not its; initialisation goes by names of classes, so the name stays."""
    return type(cls.__name__, (OfAnotherStage, cls), {"__module__": cls.__module__})


class EndsDropout(nn.Dropout):
    """A dropout that a stack applies twice, at its entry and at its exit, of which a stage may have only one."""

    def __init__(self, p: float, at_entry: bool, at_exit: bool) -> None:
        super().__init__(p)
        self.applies = (at_entry, at_exit)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        applies = self.applies[self.calls % 2]
        self.calls += 1
        return super().forward(x) if applies else x
