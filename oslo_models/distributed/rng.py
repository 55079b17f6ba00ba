"""Dropout under tensor parallelism: which random stream a mask is drawn from.

A replicated activation needs the same mask on every rank of the tp axis: it draws from torch's default generator, which
the ranks keep in step. A divided activation (the heads of an attention, the inner width of an MLP) needs a different
mask on every rank: between a column-parallel layer and the row-parallel layer that ends its region, the default
generator is re-seeded from a key drawn from the common stream, mixed with the rank. As the key comes from the common
stream, activation checkpointing, which restores that stream, draws the same masks again; there is no second state to
save. Source of the two streams: Megatron-LM's ``CudaRNGStatesTracker``; deriving one from the other is ours.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import broadcast_object


def mix(*parts: int | str) -> int:
    """A 63-bit seed that depends on all parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that torch uses on ``device`` when none is given."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def synchronize(axis: Axis, device: torch.device) -> None:
    """Bring the default generators of the axis into the state of its first rank."""
    if axis.size == 1:
        return
    for generator in {default_generator(torch.device("cpu")), default_generator(device)}:
        state = generator.get_state()
        generator.set_state(broadcast(axis, state.to(device)).cpu())


def synchronize_numpy(axis: Axis) -> None:
    """As `synchronize`, for numpy's generator: models that hear draw from it what they mask while they train."""
    if axis.size > 1:
        np.random.set_state(broadcast_object(axis, np.random.get_state()))


class ShardedRngStream:
    """Switches the default generator to a stream of this rank's own inside the divided regions of one model."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._rank = axis.rank
        self._device = device
        self._outside: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedRngStream:
        return self

    def enter(self) -> None:
        """A divided activation begins. Entering twice is entering once: query, key and value each say so."""
        if self._outside is not None:
            return
        generator = default_generator(self._device)
        key = self._draw_key(generator)
        self._outside = generator.get_state()
        generator.manual_seed(mix(key, self._rank))

    def leave(self) -> None:
        """Activations are replicated again."""
        if self._outside is not None:
            default_generator(self._device).set_state(self._outside)
            self._outside = None

    @staticmethod
    def _draw_key(generator: torch.Generator) -> int:
        """Draw from the common stream without waiting for the device."""
        if generator.device.type == "cuda":
            key = mix(generator.initial_seed(), generator.get_offset())
            generator.set_offset(generator.get_offset() + 4)
            return key
        return int(torch.randint(2**62, (), generator=generator))
