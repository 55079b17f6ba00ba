"""Training in float8, for ``fuse(float8=...)``: the products of the linear layers that tensor parallelism shards.

Weights, gradients and optimizer keep their dtypes; a product casts its operands. The scales equal the scales in one
process: the largest element of a sharded tensor is the maximum over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.float8 import ALIGNMENT, E4M3, E5M2, casts, largest, product, scale_of
from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion.modules import FusedConv1D, FusedLinear
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.layers.entries import ColumnParallel, Replicated, RowParallel
from oslo_models.layers.linear import (
    ColumnParallelConv1D,
    ColumnParallelLinear,
    GroupRowParallelLinear,
    KeyValueParallelLinear,
    RowParallelConv1D,
    RowParallelLinear,
)
from oslo_models.pipeline.sharded_model import ShardedModel

RECIPES = {"tensorwise": (8, 9), "rowwise": (9, 0)}
"""The recipes by torchao's names, with the required compute capability."""


@dataclass(frozen=True)
class Float8:
    """The float8 configuration of a linear layer.

    Attributes:
        rowwise: use a scale for each row of an operand instead of one for the tensor.
        axis: the axis of the ranks with the shards.
        row_parallel: whether inputs are sharded; otherwise outputs are.
        transposed: whether the weight is ``[in, out]``.
    """

    rowwise: bool
    axis: Axis
    row_parallel: bool
    transposed: bool

    def largest(self, *tensors: tuple[Tensor, int, bool]) -> list[Tensor]:
        """Return the largest elements of tensors, each given with the dimension of its rows and whether it is sharded.

        One all-reduce covers all sharded tensors. With a scale for each row, a tensor is sharded if its rows are split
        across ranks.
        """
        found = [largest(x, dim if self.rowwise else None) for x, dim, _ in tensors]
        shared = [index for index, (*_, sharded) in enumerate(tensors) if sharded]
        if shared and self.axis.size > 1:
            packed = torch.cat([found[index].flatten() for index in shared])
            parts = reduce_fresh(self.axis, packed, MAX).split([found[index].numel() for index in shared])
            for index, part in zip(shared, parts, strict=True):
                found[index] = part.view(found[index].shape)
        return found

    def scale(self, largest: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the scale for this largest element. Row scales are powers of two, as in torchao's recipe."""
        return scale_of(largest, dtype, self.rowwise)


class Float8Product(nn.Module):
    """The product of a linear layer in float8.

    Attributes:
        float8: the configuration.
    """

    float8: Float8

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``, or the product of ``Conv1D``."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        output: Tensor = _Product.apply(x, weight, self.float8)
        return output if bias is None else output + bias.to(output.dtype)


class Float8Linear(Float8Product, FusedLinear):
    """``nn.Linear`` in float8."""


class Float8Conv1D(Float8Product, FusedConv1D):
    """GPT-2's ``Conv1D`` in float8."""


Grads = tuple[Tensor | None, Tensor | None]


class _Product(torch.autograd.Function):
    """``x @ weight.T``. Inputs are saved for the backward pass in float8 if their scale is the same there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: Float8) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # the shard, not the full weight
            return _Product._forward(ctx, x, weight, how)

    @staticmethod
    def _forward(ctx: Any, x: Tensor, weight: Tensor, how: Float8) -> Tensor:
        rows, weight_oi = x.reshape(-1, x.shape[-1]), weight.T if how.transposed else weight
        # one scale per tensor: the weight is always sharded; one scale per row: it is sharded if its rows are
        found = how.largest((rows, 1, how.row_parallel), (weight_oi, 1, how.row_parallel or not how.rowwise))
        x_scale, w_scale = (how.scale(each, E4M3) for each in found)
        # one pass casts inputs for both products; a compiler chooses by itself where it transposes
        ctx.turned = not how.rowwise and ctx.needs_input_grad[1] and not torch.compiler.is_compiling()
        x8, turned = casts(rows, x_scale, E4M3, columns=ctx.turned)
        output = product(x8, casts(weight_oi, w_scale, E4M3)[0], x_scale, w_scale, x.dtype, fast=True)
        ctx.how, ctx.shape, ctx.dtype = how, x.shape, x.dtype
        ctx.save_for_backward(rows if how.rowwise else turned if ctx.turned else x8, weight, x_scale, w_scale)
        # not an autograd view: the all-reduce changes the output in place
        return torch.ops.aten._unsafe_view(output, (*x.shape[:-1], output.shape[1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        with torch._C.DisableTorchFunctionSubclass():
            return *_Product._backward(ctx, grad), None

    @staticmethod
    def _backward(ctx: Any, grad: Tensor) -> Grads:
        how: Float8 = ctx.how
        x, weight, *scales = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1]).to(ctx.dtype)
        weight_oi = weight.T if how.transposed else weight
        of_both = _rowwise if how.rowwise else _tensorwise
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        x = x.T if ctx.turned else x
        of_x, of_weight = of_both(how, grad, x, weight_oi, scales, ctx.dtype, (needs_x, needs_weight))
        if of_weight is not None:
            of_weight = (of_weight.T if how.transposed else of_weight).to(weight.dtype)
        return None if of_x is None else of_x.view(ctx.shape), of_weight


def _tensorwise(
    how: Float8, grad: Tensor, x8: Tensor, weight: Tensor, scales: Any, dtype: torch.dtype, needs: tuple[bool, bool]
) -> Grads:
    """Compute the gradients of inputs and weight from the output gradient in e5m2."""
    x_scale, w_scale = scales
    g_scale = how.scale(how.largest((grad, 1, not how.row_parallel))[0], E5M2)
    of_x = of_weight = None
    g8, turned = casts(grad, g_scale, E5M2, *needs)
    if g8 is not None:
        w8 = casts(weight, w_scale, E4M3, rows=False, columns=True)[1]
        of_x = product(g8, w8, g_scale, w_scale, dtype)
    if turned is not None:
        of_weight = product(turned, x8.T.contiguous(), g_scale, x_scale, dtype)
    return of_x, of_weight


def _rowwise(
    how: Float8, grad: Tensor, x: Tensor, weight: Tensor, scales: Any, dtype: torch.dtype, needs: tuple[bool, bool]
) -> Grads:
    """Compute the gradients of inputs and weight. Each product has scales of its operands' rows.

    All ranks have all tokens.
    """
    of_x = of_weight = None
    if needs[0]:
        sharded = not how.row_parallel
        g_scale, w_scale = (how.scale(e, E4M3) for e in how.largest((grad, 1, sharded), (weight, 0, sharded)))
        g8, w8 = casts(grad, g_scale, E4M3)[0], casts(weight, w_scale, E4M3, rows=False, columns=True)[1]
        of_x = product(g8, w8, g_scale, w_scale.T, dtype)
    if needs[1]:
        g_scale, x_scale = (how.scale(e, E4M3) for e in how.largest((grad, 0, False), (x, 0, False)))
        g8, x8 = (casts(t, scale, E4M3, rows=False, columns=True)[1] for t, scale in ((grad, g_scale), (x, x_scale)))
        of_weight = product(g8, x8, g_scale.T, x_scale.T, dtype)
    return of_x, of_weight


# Which layers ---------------------------------------------------------------------------------------------------------

_ROW = (RowParallelLinear, RowParallelConv1D)
_SHARDED = (ColumnParallelLinear, ColumnParallelConv1D, *_ROW)
_PLAIN: dict[type, type] = {nn.Linear: Float8Linear, Conv1D: Float8Conv1D}


def check_float8(recipe: str, device: torch.device, dtype: torch.dtype, weights: str | None) -> None:
    """Raise ``ValueError`` if ``fuse(float8=...)`` cannot be used with a model."""
    if recipe not in RECIPES:
        raise ValueError(f"float8={recipe!r} is none of {', '.join(map(repr, RECIPES))}; None keeps the model's type")
    if weights is not None:
        raise ValueError(f"float8={recipe!r} is for training, and weights={weights!r} cannot be trained: choose one")
    if why := _unavailable_reason(recipe, device, dtype):
        raise ValueError(f"float8={recipe!r} cannot be used: {why}; leave float8 out")


def _unavailable_reason(recipe: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if not hasattr(torch, "_scaled_mm"):
        return f"torch {torch.__version__} has no product of float8 matrices"
    if device.type == "cpu":
        return None if dtype == torch.float64 else _unavailable_reason_on_cpus(recipe)
    if device.type != "cuda" or torch.version.hip:
        return f"it computes on NVIDIA's GPUs and on CPUs, and the model is on {device}"
    if dtype == torch.float64:
        return "the model is in torch.float64"
    has, needs = torch.cuda.get_device_capability(device), RECIPES[recipe]
    if has >= needs:
        return None
    return f"it needs a GPU of compute capability {needs[0]}.{needs[1]}, and {device} has {has[0]}.{has[1]}"


@cache
def _unavailable_reason_on_cpus(recipe: str) -> str | None:
    """Try one product, since torch does not report the recipes of its CPU kernels."""
    x, scale = torch.ones(16, 16), torch.ones((16, 1) if recipe == "rowwise" else ())
    try:
        product(x.to(E4M3), x.to(E4M3), scale, scale, torch.float32)
    except RuntimeError:
        return f"torch {torch.__version__} multiplies {recipe} on GPUs only; newer releases do on CPUs, too"
    return None


def in_float8(
    model: ShardedModel,
    candidates: Iterable[FusionCandidate],
    subjects: Iterable[Any],
    entries: Mapping[str, Replicated],
    recipe: str,
) -> list[FusionCandidate]:
    """Return ``candidates`` with float8 candidates for all linear layers that the model's plan shards.

    The result is the same for any number of ranks.

    Args:
        subjects: the modules of the model, as the rules see them.
        entries: the plan's entries for the modules of blocks, by name in the model.

    Raises:
        ValueError: there is no such layer.
    """
    found = {}
    for subject in subjects:
        kind = type(entries.get(subject.name))
        if kind in (ColumnParallel, RowParallel) and isinstance(subject.module, (nn.Linear, Conv1D)):
            found[subject.name] = _candidate(subject, kind is RowParallel, recipe)
    if not any(candidate.cls for candidate in found.values()) and not model.is_pipeline_parallelized():
        reasons = sorted({candidate.reason for candidate in found.values()}) or ["no linear layer could be sharded"]
        raise ValueError(f"float8={recipe!r} cannot be used in {type(model).__name__}: {', '.join(reasons)}")
    return [*(candidate for candidate in candidates if candidate.module not in found), *found.values()]


def _candidate(subject: Any, row_parallel: bool, recipe: str) -> FusionCandidate:
    module: Any = subject.module
    cls: Any = type(module)
    if why := _unavailable_reason_of_layer(module):
        return subject.candidate("linear", None, f"left out of float8: {why}")
    axis = module.tp if isinstance(module, _SHARDED) else Axis.alone("tp")
    how = Float8(recipe == "rowwise", axis, row_parallel, isinstance(module, Conv1D))
    made = _PLAIN.get(cls) or _in_float8(cls)
    return subject.candidate("linear", made, f"products in float8, scales {recipe}", attributes={"float8": how})


def _unavailable_reason_of_layer(module: Any) -> str | None:
    cls = type(module)
    if isinstance(module, (GroupRowParallelLinear, KeyValueParallelLinear)):
        return "its heads are on several ranks, each with a part of their gradient"
    if cls not in _PLAIN and not isinstance(module, _SHARDED):
        return f"{cls.__name__} overrides the forward pass"
    multiple = ALIGNMENT if module.weight.is_cuda else 1
    shapes = _local_shapes(module)
    if odd := [shape for shape in shapes if any(size % multiple or not size for size in shape)]:
        return f"a weight of {odd[0][0]} x {odd[0][1]}; GPUs multiply multiples of {multiple}"
    return None


def _local_shapes(module: Any) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of the weight on all ranks, so that all ranks decide alike."""
    if isinstance(module, _SHARDED):
        layouts: Any = module.layouts
        yield from (layouts["weight"].local_shape(rank) for rank in range(module.tp.size))
    else:
        yield tuple(module.weight.shape)


@cache
def _in_float8(cls: type) -> type:
    return type(f"Float8{cls.__name__}", (Float8Product, cls), {"__module__": __name__})
