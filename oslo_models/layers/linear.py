"""Linear layers sharded over the tp axis. They subclass the replaced layers, so ``isinstance`` checks still pass.

Custom layers of an architecture keep their code. Mixins replace the torch functions that they call.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import untimed_conv1d, untimed_linear
from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.collectives import has_dispatch_mode
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import layer_context, without_override
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.overlap import overlapped_product
from oslo_models.layers.replicated_grads import summed_over_copies
from oslo_models.layers.sharded_activation import ShardedActivation
from oslo_models.layers.token_parts import product_of_whole
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class ColumnParallel(Replicated):
    """Shard the output features of a linear layer: ``y_local = x @ W_local``. The input is replicated.

    Args:
        splits: one split per matrix that the weight concatenates. Without splits, output features are split evenly.
        parts: number of matrices of equal size that the weight concatenates. Read only without splits.
        transposed: the weight is stored ``[in, out]`` (``Conv1D``) rather than ``[out, in]`` (``nn.Linear``).
        dim: sharded dimension of a bare parameter or a buffer.
        channels: the layer is a convolution or a batch norm, and its channels are sharded (`layers.channels`).

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
    """

    splits: tuple[EvenSplit, ...] = ()
    parts: int = 1
    transposed: bool = False
    dim: int = 0
    channels: bool = False

    def __init__(
        self, *splits: EvenSplit, parts: int = 1, transposed: bool = False, dim: int = 0, channels: bool = False
    ) -> None:
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "transposed", transposed)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "channels", channels)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if self.channels and shape[0] < n:
            raise ValueError(
                f"a convolution with {shape[0]} channels cannot be sharded over tensor_parallel_size={n} ranks, since "
                f"some ranks would have none: use at most {shape[0]}"
            )
        return self._sharded(shape, len(shape) - 1 if self.transposed else self.dim, n)

    def max_ranks(self) -> int | None:
        return min((split.max_ranks() for split in self.splits), default=None)

    def over_experts(self, groups: int) -> Replicated:
        splits = [split.over_experts(groups) for split in self.splits]
        if all(new is old for new, old in zip(splits, self.splits, strict=True)):
            return self
        return type(self)(*splits, parts=self.parts, transposed=self.transposed, dim=self.dim)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout.sharded(shape, dim, self.splits or (EvenSplit(shape[dim] // self.parts),) * self.parts, n)


class RowParallel(ColumnParallel):
    """Shard the input features of a linear layer. Partial outputs are all-reduced, then the bias is added.

    Args and source: as for ``ColumnParallel``.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        dim = 0 if self.transposed else 1 if self.channels else len(shape) - 1
        return Layout(shape) if leaf == "bias" else self._sharded(shape, dim, n)


@dataclass(frozen=True)
class InnerRowParallel(RowParallel):
    """Row-parallel linear layer between sharded layers. Each rank uses the full output for its local computation.

    So the gradient of the output is all-reduced. A norm of the output is a `HeadNorm`.

    Args:
        splits: as for ``ColumnParallel``. Input features of replicated key-value heads count once.
        outputs: assigns output features to ranks. Each rank keeps its features of the sum. Without it, each rank keeps
            all features.
    """

    outputs: EvenSplit | None = None

    def __init__(self, *splits: EvenSplit, outputs: EvenSplit | None = None) -> None:
        super().__init__(*splits)
        object.__setattr__(self, "outputs", outputs)


class _Linear(ShardedModule):
    """Base of linear layers."""

    weight: Tensor
    bias: Any
    product: ClassVar[Callable[..., Tensor]]
    """``product(x, weight, bias or None)``: ``F.linear`` or its replacement by `fusion`."""


class _ColumnParallel(_Linear):
    """Layer with sharded output features. Input ``[..., in]`` is replicated, output is ``[..., local_out]``.

    Attributes:
        sums_no_gradients: whether the caller all-reduces the input gradient, together with others
            (`SeparateExpertsModule`).
    """

    takes_parts = True
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
        if isinstance(x, ShardedActivation):
            return product_of_whole(self, x, bias)
        output = overlapped_product(self, x, bias)
        return self.product(copy_to(self.tp, x), self.weight, bias) if output is None else output


class _RowParallel(_Linear):
    """Layer with sharded input features. Input is ``[..., local_in]``, output ``[..., out]`` is replicated.

    Attributes:
        returns_partial_sums: whether the caller all-reduces the output, together with others (`SharedExpertsModule`).
    """

    returns_parts = True
    returns_partial_sums = False

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            partial = self.product(self.leave_region(x), self.weight)
            if self.returns_partial_sums:
                return partial if self.bias is None else partial + self._share_of_bias().to(partial.dtype)
            return self.sum_of(partial)

    def sum_of(self, partial: Tensor) -> Tensor:
        """Return the sum of the products ``partial`` of all ranks plus the bias, or this rank's tokens of it."""
        part = None if self.token_parts is None else self.token_parts.divide_sum(partial, self.bias)
        return add_bias(reduce_from(self.tp, partial), self.bias) if part is None else part

    def _share_of_bias(self) -> Tensor:
        """Return this rank's share of the bias. The shares add up to the bias, and each rank gets its full gradient."""
        value = self.bias.detach()
        share: Tensor = value / self.tp.size + (self.bias - value)
        return share


@shards(ColumnParallel, nn.Linear)
class ColumnParallelLinear(_ColumnParallel, nn.Linear):
    """``nn.Linear`` with sharded output features."""

    product = staticmethod(untimed_linear)

    @classmethod
    def for_layouts(cls, layouts: Mapping[str, Layout]) -> type[nn.Module]:
        return KeyValueParallelLinear if layouts["weight"].overlaps else cls


class KeyValueParallelLinear(ColumnParallelLinear):
    """Key or value projection with fewer heads than ranks. Some heads are replicated on several ranks.

    Each rank computes only the gradient through its local query heads. So the gradients of a head are summed over the
    ranks that hold it.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return self.product(self.enter_region(x), *(summed_over_copies(self, leaf) for leaf in ("weight", "bias")))


@shards(ColumnParallel, Conv1D)
class ColumnParallelConv1D(_ColumnParallel, Conv1D):
    """GPT-2's linear layer (weight ``[in, out]``) with sharded output features."""

    product = staticmethod(untimed_conv1d)


@shards(ColumnParallel, nn.Embedding)
def keep_embedding(module: Any, entry: ColumnParallel, context: ShardingContext) -> None:
    """Shard the columns of an embedding, such as T5's relative bias. A lookup needs no other code."""
    ShardedModule.configure(module, entry, context)


@shards(RowParallel, nn.Linear)
class RowParallelLinear(_RowParallel, nn.Linear):
    """``nn.Linear`` with sharded input features."""

    product = staticmethod(untimed_linear)

    @classmethod
    def for_layouts(cls, layouts: Mapping[str, Layout]) -> type[nn.Module]:
        return GroupRowParallelLinear if layouts["weight"].overlaps else cls


class GroupRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer with fewer groups of inputs than ranks. Some groups are on several ranks.

    Each of these ranks has partial sums of the group's inputs. So the weight gradients of a group are summed over its
    ranks.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return self.sum_of(self.product(self.leave_region(x), summed_over_copies(self, "weight")))


class KeyValueRowLinear(GroupRowParallelLinear):
    """Row-parallel linear layer after replicated key-value heads. Each head counts once.

    The first rank with a head adds its part of the output. Other ranks hold the same weights without a gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * float(bool(self.layouts["weight"].owned_indices(self.tp.rank))))


class SharesOutput:
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


@shards(InnerRowParallel, nn.Linear)
class InnerRowParallelLinear(SharesOutput, RowParallelLinear):
    """Row-parallel linear layer between sharded layers. Its output gradient is all-reduced.

    Attributes:
        outputs: split of the output features, if each rank keeps only its part.
    """

    returns_parts = False
    outputs: EvenSplit | None = None

    def configure(self, entry: InnerRowParallel, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.outputs = entry.outputs

    @classmethod
    def for_layouts(cls, layouts: Mapping[str, Layout]) -> type[nn.Module]:
        return InnerKeyValueRowLinear if layouts["weight"].overlaps else cls

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


@shards(RowParallel, Conv1D)
class RowParallelConv1D(_RowParallel, Conv1D):
    """GPT-2's linear layer (weight ``[in, out]``) with sharded input features."""

    product = staticmethod(untimed_conv1d)


def add_bias(summed: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias after the all-reduce: in place, unless compiled or under a dispatch mode."""
    if bias is None:
        return summed
    bias = bias.to(summed.dtype)
    # dynamo's autograd functions return views in torch 2.11, which must not be modified in place
    out_of_place = torch.compiler.is_compiling() or (torch.is_grad_enabled() and has_dispatch_mode())
    return summed + bias if out_of_place else summed.add_(bias)


@shards(ColumnParallel)
class ColumnParallelModule(ShardedModule):
    """Layer that calls ``F.linear``, with sharded output features. The input ``[..., in]`` is replicated."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_override():
            return super().forward(self.enter_region(x), *args, **kwargs)


@shards(RowParallel)
class RowParallelModule(ShardedModule):
    """Layer that calls ``F.linear``, with sharded input features. The input is ``[..., local_in]``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return add_bias(reduce_from(self.tp, F.linear(x, weight)), bias)

        with without_override(), FunctionOverrides({F.linear: linear}):
            return super().forward(self.leave_region(x), *args, **kwargs)
