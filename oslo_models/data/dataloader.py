"""`InfiniteDataLoader`: a loader that begins again, and can go on from where a run was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class InfiniteDataLoader:
    """Gives the batches of ``loader`` without end. When it begins again, samplers are told the number of the epoch.

    ``state_dict`` says which batch comes next, whatever workers have loaded ahead. A loader over a dataset with indices
    goes on there without loading what comes before; others are read up to there.

    Args:
        loader: a `DataLoader`, or anything else that can be iterated over repeatedly.

    Attributes:
        epoch: how often the loader has begun before.
        batches: how many batches of this epoch were given.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.epoch, self.batches = loader, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._began_with: dict[str, Any] | None = None

    def __iter__(self) -> InfiniteDataLoader:
        return self

    def __len__(self) -> int:
        """The batches of an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            ValueError: the loader has none.
        """
        if self._iterator is None and self._began_with is not None:
            batch = self._take_up(self._began_with)
        else:
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None
            batch = next(self._iterator, _END)
        if batch is _END:
            if self.batches == 0:
                raise ValueError("the loader gives no batch: its dataset is empty, or too small for a whole one")
            self.epoch, self.batches = self.epoch + 1, 0
            self._begin()
            return next(self)
        self.batches += 1
        return batch

    def _begin(self) -> None:
        self._set_epoch()
        states = [generator.get_state() for generator in self._generators()]
        self._began_with = {"rng": torch.get_rng_state(), "generators": states}
        self._iterator = iter(self.loader)

    def _take_up(self, began_with: dict[str, Any]) -> Any:
        """Begin the epoch with the random states that it began with, and give the batch after those that were given."""
        self._set_epoch()
        now = torch.get_rng_state()
        try:
            torch.set_rng_state(began_with["rng"])
            for generator, state in zip(self._generators(), began_with["generators"], strict=True):
                generator.set_state(state)
            self._iterator = _from(self.loader, self.batches)
            return next(self._iterator, _END)
        finally:
            torch.set_rng_state(now)

    def _samplers(self) -> list[Any]:
        found: list[Any] = []
        left = [getattr(self.loader, name, None) for name in ("sampler", "batch_sampler")]
        while left:
            sampler = left.pop(0)
            if sampler is not None and not any(sampler is other for other in found):
                found.append(sampler)
                left.append(getattr(sampler, "sampler", None))
        return found

    def _set_epoch(self) -> None:
        for owner in (*self._samplers(), getattr(self.loader, "dataset", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(self.epoch)

    def _generators(self) -> list[torch.Generator]:
        owners = (self.loader, *self._samplers())
        found = {id(generator): generator for owner in owners if (generator := getattr(owner, "generator", None))}
        return list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next. All of it can be pickled, and saved with ``torch.save``."""
        dataset: Any = getattr(self.loader, "dataset", None)
        saved = dataset.state_dict() if hasattr(dataset, "state_dict") else None
        return {"epoch": self.epoch, "batches": self.batches, "began_with": self._began_with, "dataset": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with a loader made as the saved one was.

        Raises:
            ValueError: the dataset gives other samples than the saved one.
        """
        if state["dataset"] is not None:
            self.loader.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self.epoch, self.batches, self._began_with = state["epoch"], state["batches"], state["began_with"]
        self._iterator = None


_END = object()


class _From:
    """What a sampler draws from its ``start``-th on."""

    def __init__(self, sampler: Iterable[Any], start: int) -> None:
        self._sampler, self._start = sampler, start

    def __iter__(self) -> Iterator[Any]:
        return islice(self._sampler, self._start, None)

    def __len__(self) -> int:
        return len(self._sampler) - self._start  # type: ignore[arg-type]


def _from(loader: Iterable[Any], start: int) -> Iterator[Any]:
    """Iterate from the ``start``-th batch on; the way is that of accelerate's ``skip_first_batches``."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return islice(loader, start, None)
    options = {name: getattr(loader, name) for name in KEPT}
    if not loader.num_workers:
        options |= {"prefetch_factor": None, "multiprocessing_context": None}
    if loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": _From(loader.sampler, start)}
    else:
        options["batch_sampler"] = _From(loader.batch_sampler, start)
    return iter(DataLoader(loader.dataset, **options))
