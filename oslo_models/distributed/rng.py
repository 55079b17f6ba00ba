"""The random streams of dropout under tensor parallelism.

A replicated activation needs the same mask on every rank of the tp axis. It is drawn from torch's default generator,
which has the same state on all ranks. A sharded activation (attention heads, the inner features of an MLP) needs a
different mask on every rank: between a column-parallel layer and the next row-parallel layer, the default generator is
seeded with a hash of the rank and a key drawn from the common stream. Activation checkpointing restores the common
stream and so draws the same key and masks again; there is no second state to save.
Source of the two streams: Megatron-LM's ``CudaRNGStatesTracker``; deriving one from the other is our own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import broadcast_object


def stable_hash(*parts: int | str) -> int:
    """Return a 63-bit hash of all parts, equal in every process, for use as a seed."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator on ``device``."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of torch's default generators, for the CPU and ``device``, at the end."""
    # A GPU has no generators before its first use.
    devices = {torch.device("cpu"), device} if torch.cuda.is_initialized() else {torch.device("cpu")}
    generators = [default_generator(each) for each in devices]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def synchronize(axis: Axis, device: torch.device, src: int = 0) -> None:
    """Set torch's default generators on all ranks of the axis to the state of the rank at position ``src``."""
    if axis.size == 1:
        return
    # Not a set: all ranks have to broadcast in the same order.
    for kind in dict.fromkeys((torch.device("cpu"), device)):
        generator = default_generator(kind)
        state = generator.get_state()
        generator.set_state(broadcast(axis, state.to(device), src).cpu())


def synchronize_numpy(axis: Axis) -> None:
    """Synchronise numpy's generator. Speech models draw their time masks from it in training."""
    if axis.size > 1:
        np.random.set_state(broadcast_object(axis, np.random.get_state()))


class ShardedRngStream:
    """Switches the default generator to a per-rank stream inside the sharded regions of one model."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._rank = axis.rank
        self._device = device
        self._common_state: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedRngStream:
        return self

    def enter(self) -> None:
        """Start a sharded region. Repeated calls, as from query, key and value layers, have no effect."""
        if self._common_state is not None:
            return
        generator = default_generator(self._device)
        key = self._draw_key(generator)
        self._common_state = generator.get_state()
        generator.manual_seed(stable_hash(key, self._rank))

    def leave(self) -> None:
        """End the sharded region, if any."""
        if self._common_state is not None:
            default_generator(self._device).set_state(self._common_state)
            self._common_state = None

    @staticmethod
    def _draw_key(generator: torch.Generator) -> int:
        """Draw a key from the common stream without waiting for the device."""
        if generator.device.type == "cuda":
            key = stable_hash(generator.initial_seed(), generator.get_offset())
            generator.set_offset(generator.get_offset() + 4)
            return key
        return int(torch.randint(2**62, (), generator=generator))
