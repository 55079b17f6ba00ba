"""`DistributedProxySampler`: distributes the samples of another sampler over the replicas."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from oslo_models.data.arguments import integer


class DistributedProxySampler(DistributedSampler[Any]):
    """Distributes the samples of ``sampler`` over the replicas, like `DistributedSampler` for a dataset.

    All replicas draw the same samples in an epoch, since the random states depend only on ``seed`` and the epoch. A
    sampler with a separate generator uses that generator; give it the same seed on all replicas. Call ``set_epoch``
    before each epoch; `InfiniteDataLoader` does so.

    Args:
        sampler: the sampler. It is drawn completely at the start of an epoch.
        num_replicas: the number of replicas. Defaults to the world size of ``torch.distributed``, or 1 without it.
        rank: the index of this replica.
        shuffle: whether the drawn samples are shuffled once more.
        seed: the seed of the shuffling, equal on all replicas.
        drop_last: whether to drop samples so that all replicas have equal numbers. Otherwise the first samples are
            repeated.
        mpu: ``model.mpu`` of a parallel model, instead of ``num_replicas`` and ``rank``. Ranks of one replica get the
            same samples.

    Raises:
        ValueError: invalid arguments.
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mpu: Any = None,
    ) -> None:
        if mpu is not None:
            if num_replicas is not None or rank is not None:
                raise ValueError("mpu states num_replicas and rank: pass either mpu or these")
            num_replicas, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        distributed = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if distributed else 1
        if rank is None:
            rank = dist.get_rank() if distributed else 0
        num_replicas, rank = integer("num_replicas", num_replicas), integer("rank", rank)
        seed = integer("seed", seed)
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank} is not 0 to {num_replicas - 1}, the replicas")
        super().__init__(sampler, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self.sampler = sampler
        self._start = self._done = 0
        self._drawn_with: torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        if epoch != self.epoch:
            self._start = self._done = 0
        super().set_epoch(integer("epoch", epoch))

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        self._done = start
        drawn = self._draw()
        order: Any = range(len(drawn))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(drawn), generator=generator).numpy()
        left = (len(drawn) - start) % self.num_replicas if drawn else 0
        stop = len(drawn) - left if self.drop_last or not left else len(drawn) + self.num_replicas - left
        for place in range(start + self.rank, stop, self.num_replicas):
            self._done += self.num_replicas
            yield drawn[int(order[place % len(drawn)])]

    def _draw(self) -> Sequence[Any]:
        generator = getattr(self.sampler, "generator", None)
        if generator is not None:
            if self._drawn_with is not None and self._done:  # resume an epoch
                generator.set_state(self._drawn_with)
            self._drawn_with = generator.get_state()
        with _seeded(self.seed + self.epoch):
            iterator = iter(self.sampler)
            first = list(islice(iterator, 1))
            if first and isinstance(first[0], int):
                return array("q", chain(first, iterator))
            return [*first, *iterator]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, provided that all replicas have drawn the same number of samples.

        A `DataLoader` with workers prefetches. Save the state of an `InfiniteDataLoader` instead in this case.
        """
        return {"epoch": self.epoch, "done": self._done, "generator": self._drawn_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume at the saved position, with any number of replicas."""
        self.epoch, self._drawn_with = state["epoch"], state["generator"]
        self._start = self._done = state["done"]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global random generators of the CPU and restore their states afterwards."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
