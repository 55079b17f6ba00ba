"""The product of a language-model head with the few rows of the running batch, on a CPU.

MKL computes ``weight @ x.T`` up to four times as fast as ``x @ weight.T`` where the weight has many rows and ``x`` has
few. Both sum the same products, so the weight stays as it is; results differ in the last bits, as they do between
batches of different sizes. Measured in float32 on two cores of an AMD EPYC, `F.linear` in ms, and this:

| weight | threads | 2 rows | 4 rows | 8 rows | 16 rows | 32 rows |
|---|---|---|---|---|---|---|
| 32000 x 256 | 1 | 11.4, 3.7 | 8.1, 3.7 | 8.5, 5.1 | 10.7, 10.9 | 18.3, 19.0 |
| 32000 x 256 | 2 | 10.5, 2.1 | 8.6, 2.9 | 9.1, 4.7 | 10.6, 7.6 | 12.3, 10.1 |
| 32000 x 768 | 1 | 24.0, 11.6 | 18.8, 9.4 | 22.1, 22.5 | 27.3, 30.5 | 43.1, 45.4 |

In float64 and bfloat16 there is no gain.

Legend:
    B: rows.
    D: hidden size.
    V: vocabulary, or this rank's shard of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_models.layers.vocab_parallel import VocabParallelHead

FEWEST_OUTPUTS = 8192
"""Smaller weights are in MKL's fast range either way."""
MOST_ROWS = 64
"""With several threads, of which `F.linear` uses only one well."""
MOST_ROWS_ALONE, MOST_ROWS_NARROW, NARROW = 5, 8, 512
"""With one thread: of any input, of one of at most ``NARROW`` features, and that size."""


@contextmanager
def fast_head(model: Any) -> Iterator[None]:
    """Within the block, the head of a model computes its logits with `product`, if it is not fused or adapted."""
    head = model.get_output_embeddings()
    own = type(head)
    if own not in _FAST:
        yield
        return
    head.__class__ = _FAST[own]
    try:
        yield
    finally:
        head.__class__ = own


def product(x: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """``F.linear``: ``[..., D]`` to ``[..., V]``."""
    rows = x.numel() // x.shape[-1]
    if not (1 < rows <= MOST_ROWS and _is_faster(rows, x, weight_VD)):
        return F.linear(x, weight_VD, bias_V)
    out_BV = torch.mm(weight_VD, x.reshape(rows, -1).t()).t().contiguous()
    if bias_V is not None:
        out_BV += bias_V
    return out_BV.view(*x.shape[:-1], -1)


def _is_faster(rows: int, x: Tensor, weight_VD: Tensor) -> bool:
    outputs, inputs = weight_VD.shape
    kind = type(weight_VD)
    if not (kind is nn.Parameter or kind is Tensor or getattr(kind, "has_plain_storage", False)):
        return False  # a quantised weight, whose class computes the product
    if x.dtype is not torch.float32 or weight_VD.dtype is not torch.float32 or outputs < FEWEST_OUTPUTS:
        return False
    if not x.is_cpu or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or not _has_mkl():
        return False
    alone = MOST_ROWS_NARROW if inputs <= NARROW else MOST_ROWS_ALONE
    return rows <= alone or torch.get_num_threads() > 1


def _has_mkl() -> bool:
    return torch.backends.mkl.is_available()


class _FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


class _FastVocabParallelHead(VocabParallelHead):
    product = staticmethod(product)


_FAST: dict[type, type] = {nn.Linear: _FastLinear, VocabParallelHead: _FastVocabParallelHead}
