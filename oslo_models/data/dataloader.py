"""`InfiniteDataLoader`: repeats a loader without end and resumes at the batch where a run stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

COPIED_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)


class InfiniteDataLoader:
    """Yields the batches of ``loader`` without end and calls ``set_epoch`` of its samplers before each epoch.

    ``state_dict`` records the next batch, independent of prefetching by workers. A loader of a map-style dataset
    resumes there without loading earlier batches. Other loaders read and skip them.

    Args:
        loader: a `DataLoader` or any other iterable that can be iterated repeatedly.

    Attributes:
        epoch: the number of the current epoch, from 0.
        batches: the number of batches yielded in this epoch.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.epoch, self.batches = loader, 0, 0
        self._iterator: Iterator[Any] | None = None
        self._start_state: dict[str, Any] | None = None

    def __iter__(self) -> InfiniteDataLoader:
        return self

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            ValueError: the loader yields no batch.
        """
        if self._iterator is None and self._start_state is not None:
            batch = self._resume(self._start_state)
        else:
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None
            batch = next(self._iterator, _END)
        if batch is _END:
            if self.batches == 0:
                raise ValueError("the loader has no batch: its dataset is empty, or smaller than a batch")
            self.epoch, self.batches = self.epoch + 1, 0
            self._begin()
            return next(self)
        self.batches += 1
        return batch

    def _begin(self) -> None:
        self._set_epoch()
        states = [generator.get_state() for generator in self._generators()]
        self._start_state = {"rng": torch.get_rng_state(), "generators": states}
        self._iterator = iter(self.loader)

    def _resume(self, start_state: dict[str, Any]) -> Any:
        """Restart the epoch with its original random states and return the first batch not yet yielded."""
        self._set_epoch()
        now = torch.get_rng_state()
        try:
            torch.set_rng_state(start_state["rng"])
            for generator, state in zip(self._generators(), start_state["generators"], strict=True):
                generator.set_state(state)
            self._iterator = _iterate_from(self.loader, self.batches)
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
        """Return the position of the next batch. It can be pickled and saved with ``torch.save``."""
        dataset: Any = getattr(self.loader, "dataset", None)
        saved = dataset.state_dict() if hasattr(dataset, "state_dict") else None
        return {"epoch": self.epoch, "batches": self.batches, "began_with": self._start_state, "dataset": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the saved position. The loader must be constructed like the saved loader.

        Raises:
            ValueError: the samples differ from the saved dataset.
        """
        if state["dataset"] is not None:
            self.loader.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        self.epoch, self.batches, self._start_state = state["epoch"], state["batches"], state["began_with"]
        self._iterator = None


_END = object()


class _SkippingSampler:
    """Sampler without its first ``start`` elements."""

    def __init__(self, sampler: Iterable[Any], start: int) -> None:
        self._sampler, self._start = sampler, start

    def __iter__(self) -> Iterator[Any]:
        return islice(self._sampler, self._start, None)

    def __len__(self) -> int:
        return len(self._sampler) - self._start  # type: ignore[arg-type]


def _iterate_from(loader: Iterable[Any], start: int) -> Iterator[Any]:
    """Iterate from batch ``start`` on, like accelerate's ``skip_first_batches``."""
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return islice(loader, start, None)
    options = {name: getattr(loader, name) for name in COPIED_OPTIONS}
    if not loader.num_workers:
        options |= {"prefetch_factor": None, "multiprocessing_context": None}
    if loader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": _SkippingSampler(loader.sampler, start)}
    else:
        options["batch_sampler"] = _SkippingSampler(loader.batch_sampler, start)
    return iter(DataLoader(loader.dataset, **options))
