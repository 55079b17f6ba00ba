"""Linear layers sharded over the tp axis. They subclass the layers they replace, so ``isinstance`` checks still pass.

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
    """The base of sharded layers.

    Attributes:
        tp: the axis over which the layer is sharded.
        stream: the random stream for dropout in the sharded region; ``None`` if the model uses no dropout.
    """

    tp: Axis
    stream: ShardedRngStream | None
    weight: Tensor
    bias: Any
    product: ClassVar[Callable[..., Tensor]]
    """``product(x, weight, bias or None)``: ``F.linear``, or what `fusion` replaces it with."""

    @property
    def qconfig(self) -> Any:
        """torch's eager quantisation announces here what to do with a layer, which it then replaces by its class.

        Raises:
            RuntimeError: when set: it would leave sharded layers as they are, without saying so.
        """
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        raise RuntimeError(
            f"torch.ao.quantization does not quantise sharded layers ({type(self).__name__}): use torchao's "
            "quantize_(), which changes weights only, or tensor_parallel_size=1"
        )

    def enter_region(self, x: Tensor) -> Tensor:
        """Pass the replicated input of a layer whose outputs are sharded through this."""
        if self.stream is not None and self.training:
            self.stream.enter()
        return copy_to(self.tp, x)

    def leave_region(self, x: Tensor) -> Tensor:
        """Pass the sharded input of a layer whose outputs are replicated through this.

        It has to be called before the layer's product: activation checkpointing recomputes a block only up to the last
        tensor that the backward pass needs, which is often this input.
        """
        if self.stream is not None:
            self.stream.leave()
        return x


class _ColumnParallel(_ShardedModule):
    """A layer with sharded outputs. Input ``[..., in]`` is replicated, output is ``[..., local_out]``.

    Attributes:
        sums_no_gradients: whether the caller sums the gradients of the input over the ranks, with others
            (`SeparateExpertsModule`).
    """

    sums_no_gradients = False

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return self.entered_product(x, self.bias)

    def entered_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product of the replicated input with this bias; on GPUs its backward pass overlaps the sum over ranks."""
        if self.stream is not None and self.training:
            self.stream.enter()
        if self.sums_no_gradients:
            return self.product(x, self.weight, bias)
        output = overlapped_product(self, x, bias)
        return self.product(copy_to(self.tp, x), self.weight, bias) if output is None else output


class _RowParallel(_ShardedModule):
    """A layer with sharded inputs. Input ``[..., local_in]``, output ``[..., out]`` is replicated.

    Attributes:
        returns_partial_sums: whether the caller sums the outputs over the ranks, with others (`SharedExpertsModule`).
    """

    returns_partial_sums = False

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            if self.returns_partial_sums:
                partial = self.product(self.leave_region(x), self.weight)
                return partial if self.bias is None else partial + self._share_of_bias().to(partial.dtype)
            return _add_bias(reduce_from(self.tp, self.product(self.leave_region(x), self.weight)), self.bias)

    def _share_of_bias(self) -> Tensor:
        """What a rank adds to its partial sum: all of them together the bias, the full gradient of which each has."""
        value = self.bias.detach()
        share: Tensor = value / self.tp.size + (self.bias - value)
        return share


class ColumnParallelLinear(_ColumnParallel, nn.Linear):
    """``nn.Linear`` with sharded outputs."""

    product = staticmethod(many_rows_linear)


class KeyValueParallelLinear(ColumnParallelLinear):
    """A key or value projection with fewer heads than ranks, so that some heads are on several ranks.

    Each rank has only the gradient that comes through its own query heads, so the gradients of a head are summed over
    the ranks that hold it.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return self.product(self.enter_region(x), *(_summed_over_copies(self, leaf) for leaf in ("weight", "bias")))


class _SharesOutput:
    """A layer the gradient of whose output is summed over the ranks, that of what an adapter adds to it included."""

    tp: Axis
    _is_shared_later = False

    def share(self, output: Tensor) -> Tensor:
        """The output ``[..., out]``, whose gradient is summed over the ranks where it needs that."""
        return copy_to(self.tp, output)

    @contextmanager
    def shared_later(self) -> Iterator[None]:
        """While active, the output is not shared: an adapter adds to it first, and calls `share` itself."""
        self._is_shared_later = True
        try:
            yield
        finally:
            del self._is_shared_later


class LatentLinear(_SharesOutput, _ShardedModule, nn.Linear):
    """A replicated projection to a latent and to the rotary part of a key that the heads of all ranks share.

    The column-parallel projection after the latent all-reduces the latent's gradient; that of the rotary part, which
    goes into the local heads directly, is all-reduced here.
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
    """GPT-2's layer, whose weight is ``[in, out]``, with sharded outputs."""

    product = staticmethod(many_rows_conv1d)


class RowParallelLinear(_RowParallel, nn.Linear):
    """``nn.Linear`` with sharded inputs."""

    product = staticmethod(many_rows_linear)


class GroupRowParallelLinear(RowParallelLinear):
    """A row-parallel layer with fewer groups of inputs than ranks, so that some groups are on several ranks.

    Each of these has partial sums of the group's inputs, so the gradients of its weights are summed over them.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            weight = _summed_over_copies(self, "weight")
            return _add_bias(reduce_from(self.tp, self.product(self.leave_region(x), weight)), self.bias)


class KeyValueRowLinear(GroupRowParallelLinear):
    """A row-parallel layer after key-value heads of which some are on several ranks: each head counts once.

    The first rank with a head adds its part of the output; the others hold the same weights without a gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(bool(self.layouts["weight"].owned_indices(self.tp.rank))))


class InnerRowParallelLinear(_SharesOutput, RowParallelLinear):
    """A row-parallel layer between sharded ones: the gradient of its output is summed over the ranks.

    Attributes:
        outputs: the split of the outputs, if a rank keeps a part of them.
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
    """Both of them."""


class RowParallelConv1D(_RowParallel, Conv1D):
    """GPT-2's layer, whose weight is ``[in, out]``, with sharded inputs."""

    product = staticmethod(many_rows_conv1d)


def _add_bias(summed: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias after the sum over the ranks: in place, unless compiled or kept by a dispatch mode."""
    if bias is None:
        return summed
    bias = bias.to(summed.dtype)
    # dynamo's autograd functions return views in torch 2.11, which must not be modified in place
    out_of_place = torch.compiler.is_compiling() or (torch.is_grad_enabled() and has_dispatch_mode())
    return summed + bias if out_of_place else summed.add_(bias)


class SumReplicatedGrad(torch.autograd.Function):
    """Identity forward on a parameter; backward sums its gradient over the ranks that hold the same elements.

    The gradient is reduced in a buffer of the full shape: replicated key-value projections are small, and no further
    process groups are needed.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SumReplicated.apply(grad, ctx.axis, ctx.layout), None, None


class _SumReplicated(torch.autograd.Function):
    """The backward pass of `SumReplicatedGrad`, and the other way round."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return sum_replicated(grad, axis, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return SumReplicatedGrad.apply(grad, ctx.axis, ctx.layout), None, None


def _summed_over_copies(layer: Any, leaf: str) -> Any:
    """A parameter of a layer, whose gradient is summed over the ranks that hold the same elements if it has one."""
    param = getattr(layer, leaf)
    if param is None or not param.requires_grad:
        return param
    return SumReplicatedGrad.apply(param, layer.tp, layer.layouts[leaf])


def sum_replicated(grad: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """Sum the gradient of a shard over the ranks that hold the same elements."""
    full = grad.new_zeros(layout.shape)
    layout.write_shard(full, grad, axis.rank)
    return layout.shard(reduce_fresh(axis, full), axis.rank).clone()
