"""transformers' top-p on a CPU, with the same bits in less time.

`TopPLogitsWarper` sorts the logits of the vocabulary with their indices. Here the values alone are sorted, by numpy,
which uses vector instructions: probabilities and their sums are then those of transformers, bit by bit, and tokens are
removed by the smallest value that stays. Measured on one core of an AMD EPYC with AVX-512, ms of CPU time for one row:

| vocabulary | `torch.sort` | `numpy.sort` | `TopPLogitsWarper` | `Nucleus` |
|---|---|---|---|---|
| 32000 | 2.4 | 0.8 | 2.7 | 1.1 |
| 50257 | 4.0 | 1.5 | 4.6 | 1.9 |
| 128256 | 11.6 | 4.0 | 13.0 | 5.5 |

Sorting several rows at once saves nothing: 8 rows of 32000 take `torch.sort` 19 ms. Of what is left of a sampled token,
drawing takes the most, 0.8 ms: `torch.multinomial` takes a random number for each token of the vocabulary from the
generator of the row, which therefore has to be asked for all of them.

Legend:
    B: rows.
    L: tokens.
    V: vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor
from transformers import TopPLogitsWarper


class Nucleus:
    """Does what a `TopPLogitsWarper` does, for float32 logits of one row on a CPU; leaves others to it."""

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self._warper = warper

    def __call__(self, input_ids: Any, scores: Any) -> Tensor:
        warper = self._warper
        if scores.dtype is not torch.float32 or not scores.is_cpu or len(scores) > 1:
            return warper(input_ids, scores)
        sorted_V = torch.from_numpy(numpy.sort(scores[0].numpy()))
        # The sums do not fall: those up to the threshold are the first ones.
        removed = int((sorted_V.softmax(-1).cumsum(-1) <= 1 - warper.top_p).sum())
        removed = min(removed, max(0, len(sorted_V) - warper.min_tokens_to_keep))
        least = sorted_V[removed]
        if removed and sorted_V[removed - 1] == least:  # which of equal ones stay is up to the order of torch.sort
            return warper(input_ids, scores)
        return scores.masked_fill(scores < least, warper.filter_value)


def faster(processor: Any) -> Any:
    """A logits processor that does the same, faster if there is such a one."""
    return Nucleus(processor) if type(processor) is TopPLogitsWarper else processor
