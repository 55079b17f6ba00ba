"""The product of a language-model head with the few rows of the running batch, on a CPU.

torch computes float32 products with MKL. oneDNN, which is a part of torch too, takes half the time for such large
vocabularies. With one thread and fewer rows of the batch, ``weight @ x.T`` by MKL is the fastest. All three sum the
same products and keep the weight as it is. Results differ in the last bits, as they do between batches of different
sizes. Measured in float32 on two cores of an AMD EPYC, ms:

| weight | threads | | 2 rows | 4 rows | 8 rows | 16 rows | 32 rows |
|---|---|---|---|---|---|---|---|
| 32000 x 256 | 1 | `F.linear` | 11.2 | 8.9 | 10.1 | 12.0 | 18.3 |
| | | ``weight @ x.T`` | 3.7 | 3.7 | 5.1 | 10.9 | 19.0 |
| | | oneDNN | 5.4 | 5.7 | 6.2 | 7.6 | 10.3 |
| 32000 x 256 | 2 | `F.linear` | 8.0 | 6.1 | 6.3 | 9.7 | 12.0 |
| | | ``weight @ x.T`` | 2.1 | 2.9 | 4.7 | 7.6 | 10.1 |
| | | oneDNN | 2.0 | 2.2 | 2.9 | 4.7 | 5.9 |
| 32000 x 768 | 1 | `F.linear` | 21.8 | 20.3 | 23.7 | 27.9 | 31.6 |
| | | ``weight @ x.T`` | 11.6 | 9.4 | 22.5 | 30.5 | 45.4 |
| | | oneDNN | 10.4 | 10.7 | 12.4 | 16.4 | 21.6 |

oneDNN is faster still with a packed weight, in oneDNN's memory order. For a fused model, the batch keeps a packed copy
of the head weight beside the original, up to `MOST_PACKED` bytes, if a measurement shows that it is faster. One thread,
ms:

| weight | | 2 rows | 8 rows | 16 rows | 32 rows | 64 rows |
|---|---|---|---|---|---|---|
| 32000 x 256 | oneDNN | 3.8 | 4.7 | 6.2 | 10.3 | 15.2 |
| | oneDNN, packed | 1.8 | 2.3 | 3.4 | 6.7 | 11.8 |
| 32000 x 768 | oneDNN | 7.2 | 9.9 | 15.5 | 21.3 | 35.0 |
| | oneDNN, packed | 6.8 | 6.1 | 9.5 | 16.2 | 30.3 |

Legend:
    B: rows.
    D: hidden size.
    V: vocabulary, or this rank's shard of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oslo_kernels.linear import by_onednn, has_onednn, untimed_linear
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.lazy_logits import LazyFullHead, LazyVocabParallelHead
from oslo_models.fusion.modules import FusedProduct
from oslo_models.layers.vocab_parallel import VocabParallelHead
from oslo_models.sharding.model_protocol import TransformersModel

FEWEST_OUTPUTS = 8192
"""Minimum outputs of the weight. Smaller weights are in MKL's fast range."""
MOST_ROWS = 64
"""Maximum rows. Larger batches are left to torch."""
MOST_ROWS_ALONE, MOST_ROWS_NARROW, NARROW = 4, 8, 512
"""Maximum rows for ``weight @ x.T`` with one thread: for any input, and for inputs of at most ``NARROW`` features."""


FEWEST_PACKED, SAMPLED_PACKED, MOST_PACKED = 4, 16, 256 << 20
"""Minimum rows for a packed weight, the rows in its timing, and the maximum bytes of a packed weight."""


class PackedHead:
    """The packed weight of a fused head. Packed on first access, and again after the weight has changed."""

    def __init__(self) -> None:
        self._of: tuple[int, ...] = ()
        self._weight: Tensor | None = None

    def weight(self, weight_VD: Tensor, product: Callable[..., Tensor]) -> Tensor | None:
        """Return the packed weight; ``None`` if it is too large, or not faster than ``product``."""
        if weight_VD.nbytes > MOST_PACKED or weight_VD.is_inference():
            return None
        of = weight_VD.data_ptr(), weight_VD._version, *weight_VD.shape
        if of != self._of:
            self._of, self._weight = of, self._made(weight_VD, product)
        return self._weight

    @staticmethod
    def _made(weight_VD: Tensor, product: Callable[..., Tensor]) -> Tensor | None:
        with without_override():
            plain_VD = weight_VD.detach()
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain_VD, SAMPLED_PACKED)
            x = plain_VD.new_full((SAMPLED_PACKED, plain_VD.shape[1]), 0.5)
            seconds = [_seconds(by_onednn, x, packed), _seconds(product, x, plain_VD)]
        return packed if seconds[0] < seconds[1] else None

    def reserve(self, model: TransformersModel) -> int:
        """Pack the weight of a model's head now. Return its bytes."""
        with torch.no_grad(), fast_head(model, self):
            head = model.get_output_embeddings()
            if not isinstance(head, _FastProduct):
                return 0
            weight: Any = head.weight
            packed = head.packed_weight(weight) if _fits(torch.empty(0), weight) else None
        return 0 if packed is None else int(weight.nbytes)


def _seconds(product: Callable[..., Tensor], x: Tensor, weight: Tensor) -> float:
    """Return the shortest of three timings."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        product(x, weight)
        found.append(time.perf_counter() - start)
    return min(found)


@contextmanager
def fast_head(model: TransformersModel, packed: PackedHead | None = None) -> Iterator[None]:
    """Context in which a model's head computes its logits with `product`, unless the head is adapted or quantised.

    Args:
        packed: for a fused head.
    """
    head = model.get_output_embeddings()
    own = type(head)
    if own not in _FAST:
        yield
        return
    head.__class__ = _FAST[own]
    if isinstance(head, _FastProduct):
        head.packed = packed
    try:
        yield
    finally:
        if isinstance(head, _FastProduct):
            del head.packed
        head.__class__ = own


def product(x: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Compute ``F.linear``, from ``[..., D]`` to ``[..., V]``."""
    rows = x.numel() // x.shape[-1]
    if not (1 < rows <= MOST_ROWS and _fits(x, weight_VD)):
        return untimed_linear(x, weight_VD, bias_V)
    if not _is_for_mkl(rows, x):
        return by_onednn(x, weight_VD, bias_V)
    out_BV = torch.mm(weight_VD, x.reshape(rows, -1).t()).t().contiguous()
    if bias_V is not None:
        out_BV += bias_V
    return out_BV.view(*x.shape[:-1], -1)


def _is_for_mkl(rows: int, x: Tensor) -> bool:
    most = MOST_ROWS_NARROW if x.shape[-1] <= NARROW else MOST_ROWS_ALONE
    return rows <= most and torch.get_num_threads() == 1 and torch.backends.mkl.is_available()


def _fits(x: Tensor, weight_VD: Tensor) -> bool:
    kind = type(weight_VD)
    if not (kind is nn.Parameter or kind is Tensor or getattr(kind, "has_plain_storage", False)):
        return False  # the class of a quantised weight computes the product
    if x.dtype is not torch.float32 or weight_VD.dtype is not torch.float32 or len(weight_VD) < FEWEST_OUTPUTS:
        return False
    return x.is_cpu and has_onednn() and not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))


class _FastLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


class _FastVocabParallelHead(VocabParallelHead):
    product = staticmethod(product)


class _FastProduct(FusedProduct):
    """A fused head that keeps the kernel chosen by `fuse`. `product` computes the shapes that `fuse` leaves to torch.

    A packed weight has precedence over both.
    """

    packed: PackedHead | None

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if FEWEST_PACKED <= x.numel() // x.shape[-1] <= MOST_ROWS and _fits(x, weight):
            packed = self.packed_weight(weight)
            if packed is not None:
                return by_onednn(x, packed, bias)
        return self.unpacked(x, weight, bias)

    def unpacked(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the product with the original weight."""
        if self.faster is not None and self.faster.way(x.numel() // x.shape[-1], x.dtype) is None:
            return product(x, weight, bias)
        return super().product(x, weight, bias)

    def packed_weight(self, weight: Tensor) -> Tensor | None:
        """Return the packed weight, if there is one."""
        return None if self.packed is None else self.packed.weight(weight, self.unpacked)


class _FastFullHead(_FastProduct, LazyFullHead):
    pass


class _FastLazyVocabParallelHead(_FastProduct, LazyVocabParallelHead):
    pass


_FAST: dict[type, type] = {
    nn.Linear: _FastLinear,
    VocabParallelHead: _FastVocabParallelHead,
    LazyFullHead: _FastFullHead,
    LazyVocabParallelHead: _FastLazyVocabParallelHead,
}
