"""`DistributedProxySampler` and `InfiniteDataLoader`: complete epochs over replicas, and resumable states."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from oslo_models.data import DatasetForCausalLM, DistributedProxySampler, InfiniteDataLoader
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.mpu import MPU

from support.corpora import write
from support.pool import Pool

MAKERS: list[Callable[[int], Sampler[int]]] = [
    lambda count: SequentialSampler(range(count)),
    lambda count: RandomSampler(range(count)),
    lambda count: RandomSampler(range(count), generator=torch.Generator().manual_seed(4)),
    lambda count: SubsetRandomSampler(range(count)),
]


@settings(max_examples=100)
@given(
    count=st.integers(1, 60),
    replicas=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    maker=st.sampled_from(MAKERS),
    epoch=st.integers(0, 3),
)
def test_proxy_sampler_partitions_the_indices_over_replicas(
    count: int, replicas: int, shuffle: bool, drop_last: bool, maker: Any, epoch: int
) -> None:
    shards = []
    for rank in range(replicas):
        torch.manual_seed(rank)  # the random states of ranks differ
        sampler = DistributedProxySampler(maker(count), replicas, rank, shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        shards.append(list(sampler))
        assert len(shards[-1]) == len(sampler)
    drawn = [index for shard in shards for index in shard]
    if drop_last:
        assert len(set(drawn)) == len(drawn) == count - count % replicas and set(drawn) <= set(range(count))
    else:
        assert set(drawn) == set(range(count)) and len(drawn) == -(-count // replicas) * replicas


def test_proxy_sampler_over_a_sequential_sampler_matches_distributed_sampler(seed: int) -> None:
    """Over a sequential sampler, the indices equal torch's DistributedSampler."""
    for shuffle in (True, False):
        for drop_last in (True, False):
            for rank in range(4):
                common = {"num_replicas": 4, "rank": rank, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
                theirs = DistributedSampler(range(29), **common)
                ours = DistributedProxySampler(SequentialSampler(range(29)), **common)
                for epoch in (0, 3):
                    theirs.set_epoch(epoch)
                    ours.set_epoch(epoch)
                    assert list(ours) == list(theirs)


def test_proxy_sampler_draws_by_epoch_and_keeps_global_rng_states(seed: int) -> None:
    class Own(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(50), 50))

        def __len__(self) -> int:
            return 50

    for inner in (Own(), RandomSampler(range(50)), WeightedRandomSampler([1.0] * 50, 50)):
        sampler = DistributedProxySampler(inner, 1, 0, shuffle=False, seed=seed)
        torch.manual_seed(1), random.seed(1)
        epochs = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        after = torch.rand(1).item(), random.random()
        torch.manual_seed(1), random.seed(1)
        assert after == (torch.rand(1).item(), random.random())
        assert epochs[0] == epochs[2] != epochs[1]


def test_proxy_sampler_over_one_index_and_over_a_batch_sampler() -> None:
    """OSLO 1 failed if a rank got one index; a sampler may also draw batches."""
    assert list(DistributedProxySampler(SequentialSampler(range(1)), 2, 1)) == [0]
    batches = BatchSampler(SequentialSampler(range(12)), 3, drop_last=False)
    shards = [list(DistributedProxySampler(batches, 2, rank, shuffle=False)) for rank in range(2)]
    assert shards == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]


def _share_of_rank() -> tuple[list[int], list[int]]:
    mpu = MPU(ParallelMesh(2))
    sampler = SequentialSampler(range(8))
    plain = list(DistributedProxySampler(sampler, shuffle=False))
    return list(DistributedProxySampler(sampler, shuffle=False, mpu=mpu)), plain


def test_proxy_sampler_gives_ranks_of_one_replica_the_same_samples(pool: Pool) -> None:
    """Ranks that hold parts of the same layers see the same samples; without ``mpu``, every process is a replica."""
    found = pool.run(4, _share_of_rank)
    assert [share for share, _ in found] == [[0, 2, 4, 6]] * 2 + [[1, 3, 5, 7]] * 2
    assert [plain for _, plain in found] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(DistributedProxySampler(SequentialSampler(range(3)), shuffle=False)) == [0, 1, 2]


@settings(max_examples=60)
@given(
    count=st.integers(1, 40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    drawn=st.integers(0, 40),
    maker=st.sampled_from(MAKERS),
    drop_last=st.booleans(),
)
def test_proxy_sampler_state_resumes_with_another_number_of_replicas(
    count: int, before: int, after: int, drawn: int, maker: Any, drop_last: bool
) -> None:
    def make(replicas: int) -> list[DistributedProxySampler]:
        made = [DistributedProxySampler(maker(count), replicas, rank, drop_last=drop_last) for rank in range(replicas)]
        for sampler in made:
            sampler.set_epoch(2)
        return made

    samplers = make(before)
    steps = min(drawn, count // before)
    first = [list(islice(sampler, steps)) for sampler in samplers]
    states = [sampler.state_dict() for sampler in samplers]
    resumed = make(after)
    for sampler in resumed:
        sampler.load_state_dict(states[0])
    rest = [list(sampler) for sampler in resumed]
    if before == after:
        assert [a + b for a, b in zip(first, rest, strict=True)] == [list(sampler) for sampler in make(before)]
    seen = {index for shard in first + rest for index in shard}
    left = (count - steps * before) % after if drop_last else 0
    assert len(seen) == count - left and len({len(shard) for shard in rest}) == 1
    resumed[0].set_epoch(3)
    assert len(list(resumed[0])) == len(resumed[0])


def test_proxy_sampler_rejects_bad_ranks() -> None:
    sampler = SequentialSampler(range(3))
    with pytest.raises(ValueError, match="rank=2 is not 0 to 1"):
        DistributedProxySampler(sampler, 2, 2)
    with pytest.raises(ValueError, match="either mpu or these"):
        DistributedProxySampler(sampler, 2, 1, mpu=SimpleNamespace())


# InfiniteDataLoader ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def loaders(workers: int) -> dict[str, Callable[[], Any]]:
    """Return constructors of loaders over 10 samples, like after a restart."""

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(7)

    def proxy(generator: torch.Generator | None = None) -> DistributedProxySampler:
        return DistributedProxySampler(RandomSampler(range(10), generator=generator), 2, 1, seed=3)

    common: dict[str, Any] = {"num_workers": workers}
    return {
        "in order": lambda: DataLoader(range(10), 3, **common),
        "shuffled": lambda: DataLoader(range(10), 3, shuffle=True, **common),
        "with a generator": lambda: DataLoader(range(10), 3, shuffle=True, generator=generator(), **common),
        "divided": lambda: DataLoader(range(10), 2, sampler=proxy(), **common),
        "divided with a generator": lambda: DataLoader(range(10), 2, sampler=proxy(generator()), **common),
        "batches": lambda: DataLoader(range(10), batch_sampler=BatchSampler(proxy(), 2, False), **common),
        "single": lambda: DataLoader(range(10), None, shuffle=True, **common),
        "streamed": lambda: DataLoader(Stream(), 4, num_workers=min(workers, 1)),
        "a list": lambda: [torch.tensor([i]) for i in range(5)],
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", loaders(0))
def test_infinite_loader_resumes_at_the_same_sample(kind: str, workers: int, seed: int) -> None:
    make = loaders(workers)[kind]
    torch.manual_seed(seed)
    loader, states, randoms = InfiniteDataLoader(make()), [], []

    def train(loader: InfiniteDataLoader, steps: int) -> list[Any]:
        batches = []
        for _ in range(steps):
            states.append(loader.state_dict())
            randoms.append(torch.get_rng_state())
            batches.append((torch.as_tensor(next(loader)).tolist(), torch.rand(1).item()))  # a model draws numbers too
        return batches

    epoch = len(list(make()))
    torch.manual_seed(seed)
    whole = train(loader, epoch + 4)
    assert loader.epoch == (epoch + 3) // epoch
    for stop in (1, epoch - 1, epoch, epoch + 2) if workers == 0 else (epoch + 2,):
        saved = io.BytesIO()
        torch.save(states[stop], saved)
        saved.seek(0)
        torch.manual_seed(stop)
        resumed = InfiniteDataLoader(make())
        resumed.load_state_dict(torch.load(saved, weights_only=True))
        torch.set_rng_state(randoms[stop])  # like training scripts that save a model and its optimizer
        assert train(resumed, epoch + 4 - stop) == whole[stop:]


def test_infinite_loader_shuffles_every_epoch() -> None:
    sampler = DistributedProxySampler(SequentialSampler(range(20)), 2, 0)
    loader = InfiniteDataLoader(DataLoader(range(20), 5, sampler=sampler))
    epochs = [torch.cat(list(islice(loader, 2))).tolist() for _ in range(3)]
    assert len(loader) == 2 and loader.epoch == sampler.epoch == 2
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert loader is iter(loader)


def test_infinite_loader_resumes_without_loading_past_samples() -> None:
    class Counted(list[int]):
        loaded = 0

        def __getitem__(self, index: Any) -> Any:
            self.loaded += 1
            return super().__getitem__(index)

    loader = InfiniteDataLoader(DataLoader(Counted(range(100)), 5))
    for _ in range(15):
        next(loader)
    dataset = Counted(range(100))
    resumed = InfiniteDataLoader(DataLoader(dataset, 5))
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed).tolist() == [75, 76, 77, 78, 79] and dataset.loaded == 5


def test_infinite_loader_rejects_an_empty_loader() -> None:
    for loader in (DataLoader([], 2), DataLoader([1], 2, drop_last=True), []):
        with pytest.raises(ValueError, match="has no batch"):
            next(InfiniteDataLoader(loader))


def test_infinite_loader_rejects_the_state_of_another_dataset(tmp_path: Path) -> None:
    write(tmp_path / "a", [70])
    states = [DataLoader(DatasetForCausalLM(tmp_path / "a", length), 2) for length in (8, 9)]
    loader, other = map(InfiniteDataLoader, states)
    next(loader)
    with pytest.raises(ValueError, match="other samples"):
        other.load_state_dict(loader.state_dict())


def test_numbers_of_numpy_do_not_overflow() -> None:
    large = np.int32(2**31 - 1)
    samplers = [DistributedProxySampler(range(9), kind(2), kind(1), seed=kind(large)) for kind in (int, np.int32)]  # type: ignore[arg-type]
    for sampler in samplers:
        sampler.set_epoch(np.int32(5))
    assert list(samplers[0]) == list(samplers[1])
