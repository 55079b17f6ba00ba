"""`DatasetBlender`: the proportions of its datasets at every prefix of the samples."""

from __future__ import annotations

import pickle
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oslo_kernels import blending
from oslo_models.data import DatasetBlender, DatasetForCausalLM

from support.corpora import write


class Numbered(list[tuple[int, int]]):
    """A dataset of samples that name their dataset and index."""

    def __init__(self, number: int, count: int) -> None:
        super().__init__((number, sample) for sample in range(count))


def numbered(counts: list[int]) -> list[Numbered]:
    return [Numbered(number, count) for number, count in enumerate(counts)]


def check(blender: DatasetBlender, weights: list[Fraction]) -> None:
    """Check that every prefix holds each dataset's share, rounded up or down, and its samples in order."""
    given_samples = [0] * len(weights)
    for place in range(len(blender)):
        number, sample = blender[place]
        assert sample == given_samples[number] % len(blender.datasets[number])
        given_samples[number] += 1
        for count, weight in zip(given_samples, weights, strict=True):
            assert abs(count - weight * (place + 1)) < 1 + 1e-9


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.one_of(st.floats(1e-6, 1e6), st.integers(0, 50), st.just(1))),
        min_size=1,
        max_size=12,
    ).filter(lambda pairs: any(weight for _, weight in pairs))
)
def test_blender_keeps_the_weights_at_every_prefix(pairs: list[tuple[int, float]]) -> None:
    counts, weights = [count for count, _ in pairs], [weight for _, weight in pairs]
    total = sum(map(Fraction, weights))
    check(DatasetBlender(numbered(counts), weights), [Fraction(weight) / total for weight in weights])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20).filter(any))
def test_blender_without_weights_gives_every_sample_once(counts: list[int]) -> None:
    blender = DatasetBlender(numbered(counts))
    check(blender, [Fraction(count, sum(counts)) for count in counts])
    assert sorted(blender) == sorted(sample for dataset in numbered(counts) for sample in dataset)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=30).filter(any), st.integers(0, 300))
def test_compiled_and_plain_blending_agree(shares: list[int], size: int) -> None:
    found = blending.blend(np.array(shares), size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blending, "load", no_compiler)
        plain = blending.blend(np.array(shares), size)
    assert all(np.array_equal(*pair) and pair[0].dtype == np.uint32 for pair in zip(found, plain, strict=True))


def no_compiler(source: str) -> None:
    raise blending.BuildError


def test_blender_of_more_than_255_datasets(seed: int) -> None:
    """OSLO 1 kept the number of a dataset in a byte."""
    rng = np.random.default_rng(seed)
    weights = (rng.random(700) ** 8).tolist()
    blender = DatasetBlender(numbered([10] * 700), weights)
    numbers = np.array([number for number, _ in blender])
    counts = (numbers[:, None] == np.arange(700)).cumsum(axis=0)
    shares = np.array(weights) / sum(weights) * np.arange(1, 7001)[:, None]
    assert np.abs(counts - shares).max() < 1 + 1e-6


@pytest.mark.parametrize(
    "kind", [np.int8, np.int32, np.int64, np.uint64, np.float32, np.float64, torch.tensor, Fraction]
)
def test_weights_of_any_kind_of_number_mean_the_same(kind: Any) -> None:
    places = [DatasetBlender(numbered([100, 300]), [kind(3), kind(7)]).place(at) for at in range(400)]
    assert places == [DatasetBlender(numbered([100, 300]), [3, 7]).place(at) for at in range(400)]
    weights = kind([3, 7]) if kind is torch.tensor else np.array([3, 7], kind if kind is not Fraction else object)
    assert [DatasetBlender(numbered([100, 300]), weights).place(at) for at in range(400)] == places
    large = DatasetBlender(numbered([2, 2]), np.array([2**62, 2**62]))
    assert sorted(large.place(at)[0] for at in range(4)) == [0, 0, 1, 1]


def test_blender_is_a_map_style_dataset(tmp_path: Path) -> None:
    for name, lengths in (("a", [30, 40]), ("b", [90])):
        write(tmp_path / name, lengths)
    parts = [DatasetForCausalLM(tmp_path / name, 5, seed=1) for name in ("a", "b")]
    blender = DatasetBlender(parts, [3, 1])
    copy = pickle.loads(pickle.dumps(blender))
    assert len(pickle.dumps(blender)) < 1500 and len(blender) == len(copy) == 39
    assert [sample.tolist() for sample in copy] == [sample.tolist() for sample in blender]
    assert np.array_equal(blender[-1], blender[38])
    for outside in (39, -40):
        with pytest.raises(IndexError):
            blender[outside]
    blender.load_state_dict(copy.state_dict())
    others = [DatasetForCausalLM(tmp_path / name, 5, seed=2) for name in ("a", "b")]
    for other, message in (
        (DatasetBlender(parts, [1, 1]), "other weights"),
        (DatasetBlender(others, [3, 1]), "other samples"),
        (DatasetBlender([*parts, parts[0]], [3, 1, 0]), "other weights"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(blender.state_dict())


def test_blender_rejects_bad_arguments() -> None:
    for counts, weights, message in (
        ([], None, "nothing to blend: 0 datasets"),
        ([0, 0], None, "nothing to blend"),
        ([1, 2], [1.0], "1 weights for 2 datasets"),
        ([1, 2], [1.0, -1.0], "are not numbers of at least 0"),
        ([1, 2], [0.0, 0.0], "are not numbers"),
        ([1, 2], [float("nan"), 1.0], "are not numbers"),
        ([1, 0], [1.0, 1.0], "dataset 1 has a weight but no samples"),
    ):
        with pytest.raises(ValueError, match=message):
            DatasetBlender(numbered(counts), weights)
