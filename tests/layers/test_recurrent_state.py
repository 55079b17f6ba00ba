"""Recurrent mixers receive the states of all heads; they read and write only the heads of their rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from oslo_models.models.rwkv import RecurrentStateLayer
from oslo_models.sharding.layout import EvenSplit

ROWS, HEADS = 2, 5


class Mixer(nn.Module):
    """Mixer with one shared state and two states per head; it returns new states or writes in place."""

    in_place = False

    def forward(self, hidden: Tensor, state: Any = None, scale: float = 1.0) -> Any:
        if state is None:
            return hidden * scale, None
        shared, first, second = state
        output = hidden * scale + first.sum((1, 2), keepdim=True) + second.sum((1, 2), keepdim=True)
        if not self.in_place:
            return output, (shared + 1, first * 2, second * 3)
        shared += 1
        first *= 2
        second *= 3
        return output, state


class ParallelMixer(RecurrentStateLayer, Mixer):
    completes = False  # as within ``generate``: there are no other ranks

    def __init__(self, size: int, rank: int, in_place: bool) -> None:
        super().__init__()
        self.tp: Any = SimpleNamespace(size=size, rank=rank)
        self.heads, self.replicated, self.in_place = EvenSplit(HEADS), 1, in_place


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, HEADS])
def test_each_rank_reads_and_writes_the_states_of_its_own_heads(seed: int, size: int, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, 1, 1, generator=generator, dtype=torch.float64)
    shapes = ((ROWS, 7), (ROWS, HEADS, 3), (ROWS, HEADS, 4))
    states = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    right, (shared, *of_heads) = Mixer()(hidden, states, scale=0.5)
    outputs = []
    for rank in range(size):
        own = [state.clone() for state in states]
        output, returned = ParallelMixer(size, rank, in_place)(hidden, own, scale=0.5)
        assert returned is own
        assert torch.equal(own[0], shared)
        start, stop = EvenSplit(HEADS).ranges(size)[rank]
        for before, after, expected in zip(states[1:], own[1:], of_heads, strict=True):
            assert torch.equal(after[:, start:stop], expected[:, start:stop])
            others = torch.ones(HEADS, dtype=torch.bool)
            others[start:stop] = False
            assert torch.equal(after[:, others], before[:, others])
        outputs.append(output - hidden * 0.5)
    torch.testing.assert_close(sum(outputs) + hidden * 0.5, right, rtol=0, atol=1e-12)


def test_without_states_there_are_none(seed: int) -> None:
    hidden = torch.randn(ROWS, 1, 1)
    output, state = ParallelMixer(2, 1, False)(hidden, scale=2.0)
    assert state is None and torch.equal(output, hidden * 2)
