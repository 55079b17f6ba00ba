"""Linear layers sharded over the tp axis. They subclass the replaced layers, so ``isinstance`` checks still pass.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import many_rows_conv1d, many_rows_linear
from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.collectives import has_dispatch_mode, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.overlap import overlapped_product
from oslo_models.sharding.layout import EvenSplit, Layout


class _ShardedModule(nn.Module):
    """Base of sharded layers.

    Attributes:
        tp: axis over which the layer is sharded.
        stream: random stream for dropout in the sharded region, or ``None`` if the model uses no dropout.
    """

    tp: Axis
    stream: ShardedRngStream | None
    weight: Tensor
    bias: Any
    product: ClassVar[Callable[..., Tensor]]
    """``product(x, weight, bias or None)``: ``F.linear`` or its replacement by `fusion`."""

    @property
    def qconfig(self) -> Any:
        """Reject torch's eager quantisation, which sets this attribute before it replaces layers.

        Raises:
            RuntimeError: on assignment. Eager quantisation would silently skip sharded layers.
        """
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise RuntimeError(
            f"torch.ao.quantization does not quantise sharded layers ({type(self).__name__}): use torchao's "
            "quantize_(), which changes weights only, or tensor_parallel_size=1"
        )

    def enter_region(self, x: Tensor) -> Tensor:
        """Enter the sharded region with the replicated input of a column-parallel layer."""
        if self.stream is not None and self.training:
            self.stream.enter()
        return copy_to(self.tp, x)

    def leave_region(self, x: Tensor) -> Tensor:
        """Leave the sharded region with the sharded input of a row-parallel layer.

        Call it before the layer's product. Activation checkpointing recomputes a block only up to the last tensor that
        the backward pass needs, and this is often the input.
        """
        if self.stream is not None:
            self.stream.leave()
        return x


class _ColumnParallel(_ShardedModule):
    """Layer with sharded output features. Input ``[..., in]`` is replicated, output is ``[..., local_out]``.

    Attributes:
        sums_no_gradients: whether the caller all-reduces the input gradient, together with others
            (`SeparateExpertsModule`).
    """

    sums_no_gradients = False

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return self.entered_product(x, self.bias)

    def entered_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the product of the replicated input and the local weight.

        On GPUs, the backward pass overlaps the all-reduce of the input gradient with the weight gradients.
        """
        if self.stream is not None and self.training:
            self.stream.enter()
        if self.sums_no_gradients:
            return self.product(x, self.weight, bias)
        output = overlapped_product(self, x, bias)
        return self.product(copy_to(self.tp, x), self.weight, bias) if output is None else output


class _RowParallel(_ShardedModule):
    """Layer with sharded input features. Input is ``[..., local_in]``, output ``[..., out]`` is replicated.

    Attributes:
        returns_partial_sums: whether the caller all-reduces the output, together with others (`SharedExpertsModule`).
    """

    returns_partial_sums = False

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            if self.returns_partial_sums:
                partial = self.product(self.leave_region(x), self.weight)
                return partial if self.bias is None else partial + self._share_of_bias().to(partial.dtype)
            return _add_bias(reduce_from(self.tp, self.product(self.leave_region(x), self.weight)), self.bias)

    def _share_of_bias(self) -> Tensor:
        """Return this rank's share of the bias. The shares add up to the bias, and each rank gets its full gradient."""
        value = self.bias.detach()
        share: Tensor = value / self.tp.size + (self.bias - value)
        return share


class ColumnParallelLinear(_ColumnParallel, nn.Linear):
    """``nn.Linear`` with sharded output features."""

    product = staticmethod(many_rows_linear)


class KeyValueParallelLinear(ColumnParallelLinear):
    """Key or value projection with fewer heads than ranks. Some heads are replicated on several ranks.

    Each rank computes only the gradient through its local query heads. So the gradients of a head are summed over the
    ranks that hold it.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return self.product(self.enter_region(x), *(_summed_over_copies(self, leaf) for leaf in ("weight", "bias")))


class _SharesOutput:
    """Layer with an all-reduced output gradient, including the adapter branch."""

    tp: Axis
    _is_shared_later = False

    def share(self, output: Tensor) -> Tensor:
        """Return the output ``[..., out]``. Partial output gradients are all-reduced."""
        return copy_to(self.tp, output)

    @contextmanager
    def shared_later(self) -> Iterator[None]:
        """Defer `share` within the block. An adapter adds to the output first and then calls `share` itself."""
        self._is_shared_later = True
        try:
            yield
        finally:
            del self._is_shared_later


class LatentLinear(_SharesOutput, _ShardedModule, nn.Linear):
    """Replicated projection to a latent and to the rotary part of a key that the heads of all ranks share.

    The column-parallel projection after the latent all-reduces the gradient of the latent. The rotary part enters the
    local heads directly, so this layer all-reduces its gradient.
    """

    rotary: int

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            output = F.linear(x, self.weight, self.bias)
            return output if self._is_shared_later else self.share(output)

    def share(self, output: Tensor) -> Tensor:
        latent, rotary = output.split([self.out_features - self.rotary, self.rotary], dim=-1)
        return torch.cat((latent, copy_to(self.tp, rotary)), dim=-1)


class ColumnParallelConv1D(_ColumnParallel, Conv1D):
    """GPT-2's linear layer (weight ``[in, out]``) with sharded output features."""

    product = staticmethod(many_rows_conv1d)


class RowParallelLinear(_RowParallel, nn.Linear):
    """``nn.Linear`` with sharded input features."""

    product = staticmethod(many_rows_linear)


class GroupRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer with fewer groups of inputs than ranks. Some groups are on several ranks.

    Each of these ranks has partial sums of the group's inputs. So the weight gradients of a group are summed over its
    ranks.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            weight = _summed_over_copies(self, "weight")
            return _add_bias(reduce_from(self.tp, self.product(self.leave_region(x), weight)), self.bias)


class KeyValueRowLinear(GroupRowParallelLinear):
    """Row-parallel linear layer after replicated key-value heads. Each head counts once.

    The first rank with a head adds its part of the output. Other ranks hold the same weights without a gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(bool(self.layouts["weight"].owned_indices(self.tp.rank))))


class InnerRowParallelLinear(_SharesOutput, RowParallelLinear):
    """Row-parallel linear layer between sharded layers. Its output gradient is all-reduced.

    Attributes:
        outputs: split of the output features, if each rank keeps only its part.
    """

    outputs: EvenSplit | None = None

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output if self._is_shared_later else self.share(output)

    def share(self, output: Tensor) -> Tensor:
        if self.stream is not None and self.training:
            self.stream.enter()
        output = super().share(output)
        return output if self.outputs is None else output[..., slice(*self.outputs.ranges(self.tp.size)[self.tp.rank])]


class InnerKeyValueRowLinear(InnerRowParallelLinear, KeyValueRowLinear):
    """`InnerRowParallelLinear` after replicated key-value heads."""


class RowParallelConv1D(_RowParallel, Conv1D):
    """GPT-2's linear layer (weight ``[in, out]``) with sharded input features."""

    product = staticmethod(many_rows_conv1d)


def _add_bias(summed: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias after the all-reduce: in place, unless compiled or under a dispatch mode."""
    if bias is None:
        return summed
    bias = bias.to(summed.dtype)
    # dynamo's autograd functions return views in torch 2.11, which must not be modified in place
    out_of_place = torch.compiler.is_compiling() or (torch.is_grad_enabled() and has_dispatch_mode())
    return summed + bias if out_of_place else summed.add_(bias)


class SumReplicatedGrad(torch.autograd.Function):
    """Identity in the forward pass. The backward pass sums a gradient over the ranks with the same elements.

    The gradient is all-reduced in a buffer of the full shape. Replicated key-value projections are small, and this
    needs no further process groups.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumReplicated.apply(grad, ctx.axis, ctx.layout), None, None


class _SumReplicated(torch.autograd.Function):
    """Backward pass of `SumReplicatedGrad`. `SumReplicatedGrad` is the backward pass of this function in turn."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return sum_replicated(grad, axis, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return SumReplicatedGrad.apply(grad, ctx.axis, ctx.layout), None, None


def _summed_over_copies(layer: Any, leaf: str) -> Any:
    """Return a parameter. Its gradient, if any, is summed over the ranks that hold the same elements."""
    param = getattr(layer, leaf)
    if param is None or not param.requires_grad:
        return param
    return SumReplicatedGrad.apply(param, layer.tp, layer.layouts[leaf])


def sum_replicated(grad: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """Sum the gradient of a shard over the ranks that hold the same elements."""
    full = grad.new_zeros(layout.shape)
    layout.write_shard(full, grad, axis.rank)
    return layout.shard(reduce_fresh(axis, full), axis.rank).clone()
