"""`DatasetForCausalLM`: samples of equal length from shuffled and concatenated documents."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from oslo_models.data.arguments import integer
from oslo_models.data.indexed_dataset import IndexedDataset
from oslo_models.data.sample_index import DatasetSplit, open_order

IGNORED = -100
"""Label of tokens excluded from the loss."""


class DatasetForCausalLM(Dataset[Any]):
    """Samples of exactly ``max_seq_length`` tokens, as int64 arrays without padding.

    Documents of the split are shuffled, concatenated and cut into samples. A sample begins with the last token of the
    previous sample, so that each token except the first is predicted once. An incomplete sample at the end is dropped.
    For the same seed, the samples and their order equal OSLO 1.

    Args:
        data_name: the path of the ``.bin`` and ``.idx`` files without their endings.
        max_seq_length: the number of tokens per sample.
        split_type: a name for the split, such as ``train``. It only appears in the file name of the index.
        start_weight: the start of the split, as a share of the documents: its first document is number
            ``round(start_weight * documents)``.
        end_weight: the end of the split, likewise (exclusive). A split that starts with the same weight is disjoint.
        binarization_impl: the way to read tokens, independent of the file format: ``mmap``, ``lazy`` or ``cached``.
        seed: the seed of the shuffling. ``None`` is 42, as in OSLO 1.
        labels: return dictionaries with ``input_ids`` and equal ``labels``. transformers' models shift the labels.
        reset_position_ids: add ``position_ids``, which restart at 0 with each document.
        reset_attention_mask: add a boolean ``attention_mask``, [1, tokens, tokens]: causal, and limited to the document
            of each token. The first token of a document is then excluded from the loss.
        cache_dir: the directory of the sample index. Defaults to ``data_name.index``.

    Raises:
        ValueError: invalid arguments, damaged files, or a split of less than one sample.
    """

    def __init__(
        self,
        data_name: str | os.PathLike[str],
        max_seq_length: int,
        split_type: str = "train",
        start_weight: float = 0.0,
        end_weight: float = 1.0,
        binarization_impl: str = "mmap",
        seed: int | None = None,
        *,
        labels: bool = False,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        # Python floats: numpy's would round the documents of a split and are not JSON
        start_weight, end_weight = float(start_weight), float(end_weight)
        max_seq_length = integer("max_seq_length", max_seq_length)
        seed = None if seed is None else integer("seed", seed)
        if not 0.0 <= start_weight < end_weight <= 1.0:
            raise ValueError(
                f"start_weight={start_weight} and end_weight={end_weight} do not fit: "
                "0 <= start_weight < end_weight <= 1"
            )
        if max_seq_length < 2:
            raise ValueError(f"max_seq_length={max_seq_length} is not at least 2: a token and the one to predict")
        self.name, self.max_seq_length = os.fspath(data_name), max_seq_length
        self._arguments = (split_type, start_weight, end_weight, binarization_impl, seed)
        self._options = {"reset_position_ids": reset_position_ids, "reset_attention_mask": reset_attention_mask}
        self._options |= {"labels": labels}
        self._dictionary = any(self._options.values())
        self._cache = None if cache_dir is None else os.fspath(cache_dir)
        self.index = IndexedDataset(self.name, binarization_impl)
        self._starts, self._lengths = self.index.documents()
        count = len(self._lengths)
        start, stop = (round(weight * count) for weight in (start_weight, end_weight))
        split = DatasetSplit(start, stop, max_seq_length - 1, 42 if seed is None else seed)
        if split.start == split.stop:
            raise ValueError(f"start_weight={start_weight} to end_weight={end_weight} holds none of {count} documents")
        folder = Path(self._cache or self.name + ".index")
        self._key = split.key(self._lengths)
        self._order = open_order(folder, f"{split_type}_length={max_seq_length}", split, self._lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {**self._options, "cache_dir": self._cache}
        return _make, (type(self), (self.name, self.max_seq_length, *self._arguments), keywords)

    def __len__(self) -> int:
        return len(self._order.shuffle)

    def __getitem__(self, index: int) -> Any:
        samples = len(self._order.shuffle)
        if not -samples <= index < samples:
            raise IndexError(f"sample {index} of a dataset of {samples}")
        documents, bounds, shuffle = self._order
        sample = int(shuffle[index])
        (begin, skipped), (end, last) = bounds[sample : sample + 2].tolist()
        which = documents[begin : end + 1].tolist()
        starts, lengths = (
            [*map(self._starts.item, which)],
            [*map(self._lengths.item, which)],
        )  # few, so faster than array operations
        lengths[-1] = last + 1
        read, stride, tokens = self.index.read, self.index.stride, np.empty(self.max_seq_length, np.int64)
        filled = 0
        for start, length in zip(starts, lengths, strict=True):
            stop = filled + length - skipped
            tokens[filled:stop] = read(start // stride + skipped, length - skipped)
            filled, skipped = stop, 0
        if not self._dictionary:
            return tokens
        lengths[0] -= bounds[sample, 1]
        return self._as_dictionary(tokens, [length for length in lengths if length], bounds[sample, 1] == 0)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch. `DataLoader` requests them together, which is faster than one by one."""
        if self._dictionary:
            return [self[index] for index in indices]
        documents, bounds, shuffle = self._order
        samples = shuffle[np.asarray(indices, np.int64)].astype(np.int64)
        begins, ends = bounds[samples], bounds[samples + 1]
        counts = ends[:, 0] - begins[:, 0] + 1
        first = np.cumsum(counts) - counts  # first document of each sample, among the documents of all samples
        which = documents[np.repeat(begins[:, 0] - first, counts) + np.arange(counts.sum())]
        starts, lengths = self._starts[which] // self.index.stride, self._lengths[which]
        lengths[first + counts - 1] = ends[:, 1] + 1
        lengths[first] -= begins[:, 1]
        starts[first] += begins[:, 1]
        batch, filled, read = np.empty((len(samples), self.max_seq_length), np.int64), 0, self.index.read
        tokens = batch.reshape(-1)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            tokens[filled : filled + length] = read(start, length)
            filled += length
        return list(batch)

    def _as_dictionary(self, tokens: NDArray[np.int64], counts: list[int], from_start: bool) -> dict[str, NDArray[Any]]:
        """Return a sample as a dictionary.

        Args:
            counts: the number of its tokens from each document.
            from_start: whether the sample includes the first token of its first document.
        """
        sample: dict[str, NDArray[Any]] = {"input_ids": tokens}
        if self._options["labels"]:
            sample["labels"] = tokens.copy()
            if self._options["reset_attention_mask"]:
                begins = np.cumsum([0, *counts[:-1]])
                sample["labels"][begins if from_start else begins[1:]] = IGNORED
        if self._options["reset_position_ids"]:
            sample["position_ids"] = np.concatenate([np.arange(count) for count in counts])
        if self._options["reset_attention_mask"]:
            document = np.repeat(np.arange(len(counts)), counts)
            sample["attention_mask"] = np.tril(document[:, None] == document[None, :])[None]
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return all inputs of the sample order. The position in training is the state of a sampler or loader."""
        return {"order": self._key, "samples": len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check that this dataset has the same samples in the same order as the saved dataset.

        Raises:
            ValueError: samples or order differ.
        """
        if state != self.state_dict():
            raise ValueError(
                f"{self.name} has other samples than the dataset of the saved state, or another order: the data, the "
                "weights, max_seq_length or the seed differ"
            )


def _make(cls: type[DatasetForCausalLM], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> DatasetForCausalLM:
    return cls(*arguments, **keywords)
