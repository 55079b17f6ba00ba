"""Linear layers on a CPU with weights in bfloat16 or int8 and everything else in float32.

Decoding takes as long as reading the weights, so half or a quarter of the bytes take half or a quarter of the time. The
library of `linear` computes products of few rows. With more rows, a part of the weights at a time is converted to
float32. int8 weights are symmetric with one scale per output, as the regular columns in LLM.int8() (Dettmers et al.,
2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels import linear

DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}
MOST_ROWS = 32
"""With more rows, the weights are converted to float32."""
_KIND = {torch.bfloat16: 3, torch.int8: 4}
_INT8_MAX = 127


@dataclass(frozen=True)
class NarrowWeight:
    """A weight in fewer bits.

    Attributes:
        values: ``[out, in]``, in bfloat16 or int8.
        scale: ``[out]`` in float32, the factors of the rows of int8 values.
    """

    values: Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, weight_oi: Tensor, dtype: torch.dtype, largest_o: Tensor | None = None) -> NarrowWeight:
        """Round a weight ``[out, in]``.

        Args:
            largest_o: the largest magnitude of each full row, for int8, if the weight is a shard of the rows.
        """
        weight_oi = weight_oi.detach()
        if dtype is not torch.int8:
            return cls(weight_oi.to(dtype).contiguous(), None)
        largest_o = (largest(weight_oi) if largest_o is None else largest_o).float()
        scale = torch.where(largest_o > 0, largest_o / _INT8_MAX, torch.ones_like(largest_o))
        values = torch.empty(weight_oi.shape, dtype=torch.int8)
        for part, row, to in _parts(weight_oi, scale, values):  # so that no full copy is made
            to.copy_((part.float() / row[:, None]).round_().clamp_(-_INT8_MAX, _INT8_MAX))
        return cls(values, scale)

    def dequantized(self) -> Tensor:
        """Return the weight ``[out, in]`` of the products in float32."""
        wide = self.values.float()
        return wide if self.scale is None else wide.mul_(self.scale[:, None])


def largest(weight_oi: Tensor) -> Tensor:
    """Return the largest magnitude of each row, ``[out]``."""
    low, high = torch.aminmax(weight_oi.detach(), dim=1)
    return torch.maximum(-low, high)


def narrow_linear(x: Tensor, weight: NarrowWeight, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with a narrow weight: ``[..., in]`` to ``[..., out]``, in the dtype of ``x``. Without gradients.

    Up to `MOST_ROWS` rows need the compiled library (`unavailable_reason`). For int8, it rounds ``x`` to 16 bits,
    relative to the largest value of 512 columns of a row. A value that is not finite makes all outputs of its row NaN.
    """
    outer, inner = weight.values.shape
    wide = x if x.dtype is torch.float32 else x.float()
    rows = x.numel() // inner if x.shape[-1] == inner and inner else 0
    if not 0 < rows <= MOST_ROWS or torch.compiler.is_compiling() or outer < linear.FEWEST_OUTPUTS:
        out = _in_parts(wide, weight, bias)
    else:
        out = _of_few_rows(wide.contiguous(), weight, bias, rows)
    return out if out.dtype is x.dtype else out.to(x.dtype)


def _of_few_rows(x: Tensor, weight: NarrowWeight, bias: Tensor | None, rows: int) -> Tensor:
    values, scale = weight.values, weight.scale
    outer, inner = values.shape
    if bias is not None and not (bias.dtype is torch.float32 and bias.is_contiguous()):
        bias = bias.float().contiguous()
    out = x.new_empty((*x.shape[:-1], outer))
    pointers = x.data_ptr(), values.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    linear.run(pointers, rows, inner, outer, _KIND[values.dtype], False, 0 if scale is None else scale.data_ptr())
    return out


def _in_parts(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """Compute the product in float32, converting a part of the weights at a time."""
    each = max(1, linear.WIDENED // max(1, weight.values.shape[1]))
    parts = [F.linear(x, part.float()) for part in weight.values.split(each)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    if weight.scale is not None:
        out.mul_(weight.scale)
    return out if bias is None else out.add_(bias)


def _parts(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    each = max(1, linear.WIDENED // max(1, tensors[0].shape[1]))
    return zip(*(tensor.split(each) for tensor in tensors), strict=True)
