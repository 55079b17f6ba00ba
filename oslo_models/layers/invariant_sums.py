"""Sums that do not depend on the shape of a batch, on padding, on blocks, on threads or on the number of ranks.

The rounding of a float sum depends on its order, and libraries choose the order by the shapes of a call. Here the terms
are integers times a power of two, and their sum stays below ``2**53``. Every order then gives the same float64 number,
without rounding, so products by any library and all-reduces of partial sums agree in every bit. The factors of a
product get up to 26 bits relative to the largest element of their row: 21 bits for rows of 768 elements.

Elementwise functions such as ``exp`` have a vector and a scalar implementation, which may differ in the last bit.
`lanewise` pads their input so that each element is computed by the same one.

Source: Ozaki et al., "Error-free transformations of matrix multiplication by using fast routines of matrix
multiplication and its applications", 2012, section 2 (the first part of a split).

Legend:
    N: rows.
    D: terms of a sum.
    O: outputs.
    B: rows of a batch.
    H: heads.
    K: key-value heads.
    L: queries.
    S: keys.
    V: vocabulary, or this rank's shard of it.
    E: experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import MAX, all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import local_tensor

MANTISSA = 53
"""Bits of a float64 sum without rounding."""
FRACTION = 30
"""Bits of an exponential between 0 and 1."""
LANES, BLOCK = 64, 1 << 15
"""Multiple of all vector widths, and the elements that torch computes in one thread."""
MOST_SCORES = 1 << 22
"""Largest number of attention scores that are in memory at once."""


def bits_of(count: int) -> int:
    """Return the bits of both factors in a sum of ``count`` products."""
    return (MANTISSA - (count - 1).bit_length()) // 2


def power_of_two(exponent: Tensor) -> Tensor:
    """Return ``2**exponent`` in float64, without rounding. ``torch.exp2`` may round."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def to_integers(x: Tensor, bits: int, most: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round each row to integers of at most ``bits`` bits, times a power of two.

    Args:
        x: ``[..., D]``.
        most: largest absolute value of each row, ``[..., 1]``. Default: of ``x``.

    Returns:
        The integers in float64, ``[..., D]``, and the powers of two, ``[..., 1]``.
    """
    most = x.detach().abs().amax(-1, keepdim=True) if most is None else most
    exponent = torch.frexp(most.to(torch.float64)).exponent
    return (x * power_of_two(bits - exponent)).round_(), power_of_two(exponent - bits)


def lanewise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function. Equal elements get equal results at all positions and in all shapes."""
    count, flat = x.numel(), x.reshape(-1)
    size = -(-count // LANES) * LANES if count < BLOCK else -(-count // BLOCK) * BLOCK
    if size != count:
        flat = torch.cat((flat, flat.new_zeros(size - count)))
    if size <= BLOCK:
        return function(flat)[:count].view(x.shape)
    return torch.cat([function(block) for block in flat.split(BLOCK)])[:count].view(x.shape)


class WithValue(torch.autograd.Function):
    """``WithValue.apply(x, value)`` has the value of the second argument and the gradient of the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# Products -------------------------------------------------------------------------------------------------------------


class RoundedWeight:
    """The integers of a weight.

    Attributes:
        keeps: keep them for later calls, until the weight changes or `release`.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._of: tuple[int, int, int] | None = None
        self._kept: tuple[Tensor, Tensor] | None = None

    def get(self, weight_OD: Tensor, bits: int, axis: Axis | None) -> tuple[Tensor, Tensor]:
        """Return the integers, [O, D], and the powers of two, [1, O].

        Args:
            axis: the ranks over which the terms are sharded.
        """
        of = weight_OD.data_ptr(), weight_OD._version, bits
        if self._kept is not None and self._of == of:
            return self._kept
        integers, scale_O1 = to_integers(weight_OD, bits, _most(weight_OD, axis))
        found = integers, scale_O1.t()
        self._of, self._kept = (of, found) if self.keeps else (None, None)
        return found

    def release(self) -> None:
        """Free the memory, and keep nothing from now on."""
        self.keeps = False
        self._of = self._kept = None


def _most(x: Tensor, axis: Axis | None) -> Tensor | None:
    """Return the largest absolute value of each full row; ``None`` if the rows are not sharded."""
    if axis is None or axis.size == 1:
        return None
    return all_reduce(axis, x.detach().abs().amax(-1, keepdim=True), MAX)


def product(
    x: Tensor, weight_OD: Tensor, bias_O: Tensor | None, kept: RoundedWeight, terms: int, axis: Axis | None = None
) -> Tensor:
    """Compute ``F.linear``: ``[..., D]`` to ``[..., O]``, with the gradients of ``F.linear``.

    Args:
        terms: the number of terms of a full sum.
        axis: the ranks over which the terms are sharded. They all-reduce the sums.
    """
    found: Tensor = _Product.apply(x, weight_OD, bias_O, kept, terms, axis)
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_OD: Tensor,
        bias_O: Tensor | None,
        kept: RoundedWeight,
        terms: int,
        axis: Axis | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OD)
        ctx.has_bias = bias_O is not None
        bits, x_ND = bits_of(terms), x.reshape(-1, x.shape[-1])
        w_OD, w_scale_1O = kept.get(local_tensor(weight_OD), bits, axis)
        x_ND, x_scale_N1 = to_integers(x_ND, bits, _most(x_ND, axis))
        sums_NO = x_ND @ w_OD.t()
        if axis is not None and axis.size > 1:
            sums_NO = all_reduce(axis, sums_NO)
        y_NO = sums_NO.mul_(x_scale_N1).mul_(w_scale_1O).to(x.dtype)
        if bias_O is not None:
            y_NO += local_tensor(bias_O)
        return y_NO.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors  # read once, as activation checkpointing requires
        weight_OD = local_tensor(weight)
        grad_NO, x_ND = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs = ctx.needs_input_grad
        grad_x = (grad_NO @ weight_OD).view(x.shape) if needs[0] else None
        grad_w = grad_NO.t() @ x_ND if needs[1] else None
        grad_b = grad_NO.sum(0) if ctx.has_bias and needs[2] else None
        return grad_x, grad_w, grad_b, None, None, None


def normalized(
    x: Tensor, epsilon: float, terms: int, axis: Axis | None = None, owned: Sequence[Any] = (slice(None),)
) -> Tensor:
    """Divide each row by its root mean square. Returns float32, ``[..., D]``.

    Args:
        terms: the number of elements of a full row.
        axis: the ranks over which rows are sharded. They all-reduce the sums of squares.
        owned: indices of the local elements that count on this rank.
    """
    x_32 = x.float()
    integers, scale = to_integers(x_32, bits_of(terms), _most(x_32, axis))
    squares = integers.square_()
    sums = squares.new_zeros(scale.shape)
    for index in owned:
        sums += squares[..., index].sum(-1, keepdim=True)
    if axis is not None and axis.size > 1:
        sums = all_reduce(axis, sums)
    variance = sums * scale.square() / terms
    return x_32 * (variance + epsilon).sqrt().reciprocal().float()


def probabilities(scores_NE: Tensor) -> Tensor:
    """Compute the softmax of each row, [N, E], in float32."""
    scores_NE = scores_NE.to(torch.float64)
    shares_NE = lanewise(torch.exp, scores_NE - scores_NE.amax(-1, keepdim=True)).mul_(2.0**FRACTION).round_()
    return (shares_NE / shares_NE.sum(-1, keepdim=True)).float()


def products_of_experts(
    x_ND: Tensor,
    weight_EOD: Tensor,
    expert_N: Tensor,
    kept: RoundedWeight,
    terms: int,
    axis: Axis | None = None,
) -> Tensor:
    """Multiply each row with the weight of its expert. Returns [N, O].

    Args:
        terms: the number of terms of a full sum.
        axis: the ranks over which the terms are sharded. They all-reduce the sums.
    """
    weight_EOD, bits = local_tensor(weight_EOD), bits_of(terms)
    count, outputs, _ = weight_EOD.shape
    integers, scale = kept.get(weight_EOD.flatten(0, 1), bits, axis)
    w_EOD, w_scale_EO = integers.unflatten(0, (count, outputs)), scale.view(count, outputs)
    integers_ND, scale_N1 = to_integers(x_ND, bits, _most(x_ND, axis))
    sums_NO = integers_ND.new_zeros(len(x_ND), outputs)
    for expert in range(count):
        rows = (expert_N == expert).nonzero()[:, 0]
        sums_NO[rows] = integers_ND[rows] @ w_EOD[expert].t()
    if axis is not None and axis.size > 1:
        sums_NO = all_reduce(axis, sums_NO)
    return sums_NO.mul_(scale_N1).mul_(w_scale_EO[expert_N]).to(x_ND.dtype)


# Attention ------------------------------------------------------------------------------------------------------------


def rounded_states(keys: Tensor, values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Round keys and values to integers times powers of two, in float64.

    Args:
        keys, values: ``[B, K, S, D]``.
        most: maximum number of keys of a query.

    Returns:
        The keys, ``[B, K, S, D]``, and the integers of the values with their power of two, ``[B, K, S, D + 1]``.
    """
    integers, scale = to_integers(keys, bits_of(keys.shape[-1]))
    return integers.mul_(scale), torch.cat(to_integers(values, bits_of(most)), -1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shown: Tensor | None,
    scaling: float,
    most: int,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention of each query to the keys that its mask shows.

    Args:
        query: ``[B, H, L, D]``.
        key, value: ``[B, K, S, D]``, or the results of `rounded_states`.
        shown: boolean, ``[B or 1, 1, L, S]``; ``None``: each query sees the keys up to its own position.
        most: maximum number of keys of a query.
        softcap: bound of the scores.

    Returns:
        ``[B, L, H, D]``.
    """
    if key.dtype is not torch.float64:
        key, value = rounded_states(key, value, most)
    rows, heads, length, _ = query.shape
    keys = key.shape[2]
    if shown is None:
        places = torch.arange(keys, device=query.device)
        shown = (places <= places[-length:, None])[None, None]
    size = max(1, MOST_SCORES // (heads * length * keys))
    if rows <= size:
        return _attention(query, key, value, shown, scaling, most, softcap)
    shown = shown.expand(rows, -1, -1, -1)
    parts = zip(*(each.split(size) for each in (query, key, value, shown)), strict=True)
    return torch.cat([_attention(q, k, v, mask, scaling, most, softcap) for q, k, v, mask in parts])


def _attention(
    query: Tensor, key: Tensor, value: Tensor, shown: Tensor, scaling: float, most: int, softcap: float | None
) -> Tensor:
    rows, heads, length, width = query.shape
    groups, keys = key.shape[1], key.shape[2]
    integers, scale = to_integers(query, bits_of(width))
    by_groups = (rows, groups, -1)
    scores = integers.reshape(*by_groups, width) @ key.transpose(-1, -2)
    scores = scores.mul_(scale.reshape(*by_groups, 1)).mul_(scaling).view(rows, heads, length, keys)
    if softcap is not None:
        scores = lanewise(torch.tanh, scores.div_(softcap)).mul_(softcap)
    scores.masked_fill_(~shown, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    scores -= largest.masked_fill(largest == -torch.inf, 0.0)
    weights = lanewise(torch.exp, scores).mul_(2.0**FRACTION).round_()
    total = weights.sum(-1, keepdim=True)
    weights = weights.reshape(*by_groups, keys) * value[..., -1].unsqueeze(2)  # the powers of two of the values
    integers, scale = to_integers(weights, bits_of(most))
    output = (integers @ value[..., :-1]).mul_(scale).view(rows, heads, length, -1)
    output /= total.clamp(min=1.0)
    return output.to(query.dtype).transpose(1, 2).contiguous()


# Log-probabilities ----------------------------------------------------------------------------------------------------


def log_probabilities(scores_NV: Tensor, target_N: Tensor, axis: Axis | None = None, start: int = 0) -> Tensor:
    """Return the logarithm of the target's probability in each row, [N], in float32.

    Args:
        scores_NV: the local columns of the scores.
        target_N: indices into the full vocabulary.
        axis: the ranks over which the vocabulary is sharded.
        start: the first local column.
    """
    scores_NV = scores_NV.to(torch.float64)
    local_N1 = (target_N - start).unsqueeze(-1)
    is_elsewhere_N1 = (local_N1 < 0) | (local_N1 >= scores_NV.shape[-1])
    picked_N1 = scores_NV.gather(-1, local_N1.masked_fill(is_elsewhere_N1, 0)).masked_fill(is_elsewhere_N1, -torch.inf)
    most_2N = torch.stack((scores_NV.amax(-1), picked_N1.squeeze(-1)))
    if axis is not None and axis.size > 1:
        most_2N = all_reduce(axis, most_2N, MAX)
    largest_N, picked_N = most_2N
    shares_NV = lanewise(torch.exp, scores_NV - largest_N.unsqueeze(-1)).mul_(2.0**FRACTION).round_()
    total_N = shares_NV.sum(-1)
    if axis is not None and axis.size > 1:
        total_N = all_reduce(axis, total_N)
    return (picked_N - largest_N - lanewise(torch.log, total_N * 2.0**-FRACTION)).float()
