"""`DatasetForCausalLM`: the samples of OSLO 1, splits, labels and masks, and its cached index."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from oslo_models.data import DatasetForCausalLM
from oslo_models.data.indexed_dataset import IMPLS

from support.corpora import write
from support.pool import Pool


def original(lengths: list[int], start: int, stop: int, length: int, seed: int) -> tuple[NDArray[Any], list[Any]]:
    """The samples of OSLO 1 by their definition: all shuffled documents in a row, cut with an overlap of one token."""
    rng = np.random.RandomState(seed)
    documents = np.arange(start, stop, dtype=np.int32)
    rng.shuffle(documents)
    ends = np.cumsum(lengths)
    tokens = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in documents])
    shuffle = np.arange((len(tokens) - 1) // (length - 1), dtype=np.uint32)
    rng.shuffle(shuffle)
    starts = shuffle.astype(np.int64) * (length - 1)
    return tokens, [tokens[begin : begin + length] for begin in starts]


@pytest.mark.parametrize("written", ["mmap", "lazy"])
@pytest.mark.parametrize("impl", IMPLS)
def test_samples_match_oslo_1(impl: str, written: str, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 2, 7, 60], 50).tolist()
    write(tmp_path / "a", lengths, "uint16", written)
    for given_seed, length in ((None, 9), (seed, 2), (3, 31)):
        dataset = DatasetForCausalLM(tmp_path / "a", length, binarization_impl=impl, seed=given_seed)
        _, samples = original(lengths, 0, 50, length, 42 if given_seed is None else given_seed)
        assert len(dataset) == len(samples)
        for found, right in zip(dataset, samples, strict=True):
            assert found.dtype == np.int64 and found.shape == (length,) and np.array_equal(found, right)
        chosen = rng.integers(-len(dataset), len(dataset), 30).tolist()
        together = dataset.__getitems__(chosen)
        assert all(np.array_equal(found, samples[i]) for found, i in zip(together, chosen, strict=True))
        with pytest.raises(IndexError):
            dataset.__getitems__([0, len(dataset)])
        assert np.array_equal(dataset[-1], samples[-1]) and np.array_equal(dataset[np.int64(0)], samples[0])
        for outside in (len(dataset), -len(dataset) - 1):
            with pytest.raises(IndexError):
                dataset[outside]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40),
    cuts=st.lists(st.floats(0, 1), max_size=3),
    length=st.integers(2, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_split_holds_the_tokens_of_its_documents_only(
    lengths: list[int], cuts: list[float], length: int, seed: int
) -> None:
    """Samples hold every token of their split's documents, except a remainder too short for a sample, and no others."""
    bounds = [0.0, *sorted(set(cuts) - {0.0, 1.0}), 1.0]
    count, ends = len(lengths), np.cumsum([0, *lengths])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "a"), lengths)
        seen_by_any: set[int] = set()
        for start, end in zip(bounds, bounds[1:], strict=False):
            first, last = round(start * count), round(end * count)
            inside = set(range(int(ends[first]), int(ends[last])))
            make = (Path(folder, "a"), length, "split", start, end, "mmap", seed)
            if len(inside) < length:
                with pytest.raises(ValueError, match=r"holds none of|less than one sample"):
                    DatasetForCausalLM(*make)
                continue
            tokens, _ = original(lengths, first, last, length, seed)
            seen = np.concatenate(list(DatasetForCausalLM(*make)))
            unique = set(seen.tolist())
            left = set(tokens.tolist()) - unique
            assert unique <= inside and not unique & seen_by_any
            assert len(left) < length - 1 and left == set(tokens[len(tokens) - len(left) :].tolist())
            assert len(seen) - len(unique) == len(seen) // length - 1  # only adjacent samples overlap
            seen_by_any |= unique


def test_splits_of_one_name_have_separate_indices(tmp_path: Path) -> None:
    """OSLO 1 confused indices of splits with the same name, and indices of old and new data."""
    write(tmp_path / "a", [5] * 100)
    common = {"max_seq_length": 4, "split_type": "valid"}
    valid = DatasetForCausalLM(tmp_path / "a", start_weight=0.8, end_weight=0.9, **common)
    test = DatasetForCausalLM(tmp_path / "a", start_weight=0.9, end_weight=1.0, **common)
    assert {int(token) // 50 for sample in valid for token in sample} == {8}
    assert {int(token) // 50 for sample in test for token in sample} == {9}
    orders = set((tmp_path / "a.index").iterdir())
    write(tmp_path / "a", [5] * 99 + [4])
    DatasetForCausalLM(tmp_path / "a", start_weight=0.8, end_weight=0.9, **common)
    assert set((tmp_path / "a.index").iterdir()) == orders  # its documents are unchanged
    other = DatasetForCausalLM(tmp_path / "a", start_weight=0.9, end_weight=1.0, **common)
    assert len(set((tmp_path / "a.index").iterdir()) - orders) == 1
    assert max(int(token) for sample in other for token in sample) < 499


def test_index_built_in_chunks_is_the_same(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build the index in small chunks."""
    monkeypatch.setattr("oslo_models.data.sample_index.CHUNK", 7)
    monkeypatch.setattr("oslo_models.data.indexed_dataset.CHUNK", 5)
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 3, 40], 60).tolist()
    write(tmp_path / "a", lengths)
    dataset = DatasetForCausalLM(tmp_path / "a", 6, start_weight=0.2, seed=seed)
    _, samples = original(lengths, 12, 60, 6, seed)
    assert all(np.array_equal(*pair) for pair in zip(dataset, samples, strict=True))


def test_split_keeps_documents_of_several_sequences_together(tmp_path: Path) -> None:
    write(tmp_path / "a", [2, 3, 0, 4, 1], ends=[0, 2, 3, 5])
    dataset = DatasetForCausalLM(tmp_path / "a", 5, end_weight=0.34)
    assert [sample.tolist() for sample in dataset] == [[0, 1, 2, 3, 4]]


def test_labels_position_ids_and_attention_mask_reset_at_documents(tmp_path: Path, seed: int) -> None:
    lengths = [3, 0, 1, 4, 9, 2] * 5
    write(tmp_path / "a", lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)  # document of each token
    first = np.concatenate([np.arange(count) == 0 for count in lengths])
    make = (tmp_path / "a", 8, "train", 0.0, 1.0, "mmap", seed)
    everything = {"labels": True, "reset_position_ids": True, "reset_attention_mask": True}
    plain, labelled, dressed = (DatasetForCausalLM(*make, **o) for o in ({}, {"labels": True}, everything))
    for tokens, pair, sample in zip(plain, labelled, dressed, strict=True):
        assert sorted(pair) == ["input_ids", "labels"] and np.array_equal(pair["labels"], tokens)
        assert sorted(sample) == ["attention_mask", "input_ids", "labels", "position_ids"]
        assert np.array_equal(sample["input_ids"], tokens) and np.array_equal(pair["input_ids"], tokens)
        assert np.array_equal(sample["labels"], np.where(first[tokens], -100, tokens))
        own = document[tokens]
        begins = [0 if i == 0 or own[i] != own[i - 1] else None for i in range(8)]
        position, positions = 0, []
        for begin in begins:
            position = 0 if begin == 0 else position + 1
            positions.append(position)
        assert sample["position_ids"].tolist() == positions
        mask = [[[own[i] == own[j] and j <= i for j in range(8)] for i in range(8)]]
        assert sample["attention_mask"].tolist() == mask
    assert sample["attention_mask"].dtype == bool and sample["attention_mask"].shape == (1, 8, 8)


def test_reset_mask_and_positions_isolate_documents(tmp_path: Path) -> None:
    """With the mask and the positions, the logits of a document equal the logits of the document alone."""
    import transformers as hf

    write(tmp_path / "a", [7, 6, 9, 8])
    dataset = DatasetForCausalLM(tmp_path / "a", 16, reset_position_ids=True, reset_attention_mask=True)
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2)).eval()
    batch = next(iter(DataLoader(dataset, batch_size=1)))
    with torch.no_grad():
        together = model(**batch).logits[0]
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        parts = [model(part[None]).logits[0] for part in batch["input_ids"][0].tensor_split(starts[1:])]
    assert len(parts) > 1
    torch.testing.assert_close(together, torch.cat(parts), atol=1e-5, rtol=1e-5)


def test_dataset_works_in_data_loader_workers_and_pickles(tmp_path: Path, seed: int) -> None:
    write(tmp_path / "a", [11] * 80)
    for impl in IMPLS:
        dataset = DatasetForCausalLM(tmp_path / "a", 8, binarization_impl=impl, seed=seed)
        right = torch.tensor(np.stack(list(dataset)))
        message = pickle.dumps(dataset)
        assert len(message) < 1000
        assert torch.equal(torch.tensor(np.stack(list(pickle.loads(message)))), right)
        batches = DataLoader(dataset, batch_size=7, num_workers=2)
        assert torch.equal(torch.cat(list(batches)), right)
        assert torch.equal(torch.cat(list(batches)), right)


def _build_together(name: Path) -> tuple[list[int], bool]:
    dataset = DatasetForCausalLM(name, 16, seed=5)
    return [int(sample.sum()) for sample in dataset], torch.distributed.is_initialized()


def test_concurrent_processes_build_one_index(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [9] * 3000)
    found = pool.run(4, _build_together, tmp_path / "a")
    assert len({tuple(sums) for sums, _ in found}) == 1
    assert len(list((tmp_path / "a.index").iterdir())) == 1
    # without file-system locks, one of the building processes wins
    order, answers = next((tmp_path / "a.index").iterdir()), [False, False]

    def exists(path: Path) -> bool:
        return answers.pop() if path == order and answers else path.is_dir() or path.is_file()

    monkeypatch.setattr("pathlib.Path.exists", exists)
    assert [int(sample.sum()) for sample in DatasetForCausalLM(tmp_path / "a", 16, seed=5)] == found[0][0]
    assert not answers and list((tmp_path / "a.index").iterdir()) == [order]


def test_dataset_makes_no_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OSLO 1 started NCCL if a launcher had set WORLD_SIZE."""
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    write(tmp_path / "a", [50])
    assert len(DatasetForCausalLM(tmp_path / "a", 8)) == 7
    assert not torch.distributed.is_initialized()


def test_cache_dir_replaces_an_unwritable_directory(tmp_path: Path) -> None:
    write(tmp_path / "a", [50])
    (tmp_path / "a.index").write_text("in the way")
    with pytest.raises(ValueError, match=r"cannot be written to .*; pass cache_dir"):
        DatasetForCausalLM(tmp_path / "a", 8)
    dataset = DatasetForCausalLM(tmp_path / "a", 8, cache_dir=tmp_path / "else")
    assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset) == 7


def test_state_of_other_samples_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a", [50, 60, 3])
    saved = DatasetForCausalLM(tmp_path / "a", 8, seed=1).state_dict()
    DatasetForCausalLM(tmp_path / "a", 8, "other", seed=1).load_state_dict(saved)
    for other in ({"seed": 2}, {"max_seq_length": 9}, {"end_weight": 0.7}):
        with pytest.raises(ValueError, match="other samples"):
            DatasetForCausalLM(tmp_path / "a", **{"max_seq_length": 8, "seed": 1, **other}).load_state_dict(saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start_weight": -0.1}, "start_weight=-0.1"),
        ({"start_weight": 0.5, "end_weight": 0.5}, "end_weight=0.5"),
        ({"end_weight": 1.1}, "end_weight=1.1"),
        ({"max_seq_length": 1}, "max_seq_length=1"),
        ({"binarization_impl": "disk"}, "binarization_impl='disk'"),
        ({"max_seq_length": 52}, "documents 0 to 1 have 51 tokens, less than one sample of 52"),
        ({"end_weight": 0.1}, "holds none of 1 documents"),
    ],
)
def test_dataset_rejects_bad_arguments(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "a", [51])
    with pytest.raises(ValueError, match=message):
        DatasetForCausalLM(tmp_path / "a", **{"max_seq_length": 8, **arguments})


def test_arguments_of_numpy_mean_the_same(tmp_path: Path) -> None:
    write(tmp_path / "data", [7, 5, 9, 30, 2])
    plain = DatasetForCausalLM(tmp_path / "data", 4, end_weight=0.5, seed=3)
    same = DatasetForCausalLM(tmp_path / "data", np.int32(4), end_weight=np.float16(0.5), seed=np.int64(3))
    assert [each.tolist() for each in same] == [each.tolist() for each in plain]
    for wrong in ({"max_seq_length": 4.5}, {"max_seq_length": 4, "seed": "3"}):
        with pytest.raises(ValueError, match="is not an integer"):
            DatasetForCausalLM(tmp_path / "data", **wrong)  # type: ignore[arg-type]
