"""`DatasetBlender`: mixes several datasets evenly by weight."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from oslo_kernels.blending import blend

PRECISION = 1 << 61
"""Weights are rounded to multiples of ``1 / PRECISION`` of their sum."""


class DatasetBlender(Dataset[Any]):
    """Interleaves several datasets. A dataset of weight ``w`` has ``w * k`` (rounded) of the first ``k`` samples.

    The length is the sum of all lengths. A dataset starts over if its weight requires more samples than it has.

    Args:
        datasets: any number of datasets with a length.
        weights: the weight of each dataset, not negative. They need not sum to 1. Defaults to the lengths, so that
            every sample occurs once.

    Raises:
        ValueError: no datasets, invalid weights, or a positive weight of a dataset without samples.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        self.datasets = list(datasets)
        self._lengths = [len(dataset) for dataset in self.datasets]
        if weights is not None and len(weights) != len(self.datasets):
            raise ValueError(f"{len(weights)} weights for {len(self.datasets)} datasets")
        if not sum(self._lengths):
            raise ValueError(f"nothing to blend: {len(self.datasets)} datasets with no samples")
        self._shares = _shares(self._lengths if weights is None else weights)
        for number, (share, length) in enumerate(zip(self._shares, self._lengths, strict=True)):
            if share and not length:
                raise ValueError(f"dataset {number} has a weight but no samples; leave it out or give it the weight 0")
        self._places: tuple[NDArray[Any], NDArray[Any]] | None = None

    def _blended(self) -> tuple[NDArray[Any], NDArray[Any]]:
        if self._places is None:  # on first use in each process, since it is not pickled
            dataset, sample = blend(np.array(self._shares, np.int64), len(self))
            self._places = dataset.astype(np.min_scalar_type(len(self.datasets) - 1)), sample
        return self._places

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_places": None}

    def __len__(self) -> int:
        return sum(self._lengths)

    def __getitem__(self, index: int) -> Any:
        which, sample = self.place(index)
        return self.datasets[which][sample]

    def place(self, index: int) -> tuple[int, int]:
        """Return the index of a sample's dataset and the sample's index in this dataset."""
        datasets, samples = self._places or self._blended()
        if not -len(datasets) <= index < len(datasets):
            raise IndexError(f"sample {index} of a dataset of {len(datasets)}")
        which = int(datasets[index])
        return which, int(samples[index]) % self._lengths[which]

    def state_dict(self) -> dict[str, Any]:
        """Return all inputs of the sample order. The position in training is the state of a sampler or loader."""
        states = [dataset.state_dict() if hasattr(dataset, "state_dict") else None for dataset in self.datasets]
        return {"shares": self._shares, "lengths": self._lengths, "datasets": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that the state belongs to this blend.

        Raises:
            ValueError: the weights or the datasets differ.
        """
        for key, what in (("shares", "weights"), ("lengths", "datasets of other lengths")):
            if state[key] != self.state_dict()[key]:
                raise ValueError(f"the saved state is of a blend with other {what}")
        for dataset, saved in zip(self.datasets, state["datasets"], strict=True):
            if saved is not None:
                dataset.load_state_dict(saved)


def _shares(weights: Sequence[float]) -> list[int]:
    """Convert weights to integers in the same proportion, to a precision of 61 bits."""
    try:
        exact = [_fraction(weight) for weight in weights]
    except (TypeError, ValueError, OverflowError):  # not a number, NaN, infinity
        exact = []
    if min(exact, default=-1) < 0 or not any(exact):
        raise ValueError(f"weights={list(weights)} are not numbers of at least 0, at least one of them positive")
    if all(weight.denominator == 1 for weight in exact) and sum(exact) < PRECISION:
        return [int(weight) for weight in exact]
    total = sum(exact)
    return [max(round(weight * PRECISION / total), 1) if weight else 0 for weight in exact]


def _fraction(weight: Any) -> Fraction:
    """Return the exact value of a Python, numpy or torch number. The latter two would overflow below."""
    return Fraction(weight.item() if hasattr(weight, "item") else weight)
