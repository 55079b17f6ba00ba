"""Embedding, LM head and logits with a vocabulary sharded over the tp axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from oslo_kernels.linear import untimed_linear
from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import layer_context, without_override
from oslo_models.layers.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from oslo_models.layers.function_overrides import FunctionOverrides
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.plain_functions import PLAIN_FUNCTIONS
from oslo_models.layers.sharded_activation import ShardedActivation
from oslo_models.layers.token_parts import product_of_whole
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class VocabParallel(Replicated):
    """Shard the rows of an embedding, an LM head or its bias: one row per token of the vocabulary."""

    embeds_tokens: ClassVar[bool] = True

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if shape[0] < n:
            raise ValueError(
                f"a vocabulary of {shape[0]} tokens cannot be sharded over tensor_parallel_size={n} ranks, since some "
                f"ranks would have none: use at most {shape[0]}"
            )
        return Layout.sharded(shape, 0, (EvenSplit(shape[0]),), n)


class _VocabParallel(ShardedModule):
    """Base of embeddings.

    Attributes:
        padding_idx: local row without a gradient, if this rank holds it.
    """

    padding_idx: int | None

    def configure(self, entry: VocabParallel, context: ShardingContext) -> None:
        super().configure(entry, context)
        layout = context.shards.get("weight")
        if self.padding_idx is not None and layout is not None and layout.dim is not None:
            ((start, stop),) = layout.ranges[self.tp.rank]
            self.padding_idx = self.padding_idx - start if start <= self.padding_idx < stop else None


@shards(VocabParallel, nn.Embedding)
class VocabParallelEmbedding(_VocabParallel, nn.Embedding):
    """``nn.Embedding`` with a sharded vocabulary. Maps token ids ``[...]`` to ``[..., hidden]``, replicated."""

    is_wrapped = True
    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        with without_override():
            return vocab_parallel_embedding(self.tp, ids, self.weight, self.layouts["weight"], self.padding_idx)


def vocab_parallel_embedding(
    axis: Axis, ids: Tensor, weight: Tensor, layout: Layout, padding_idx: int | None
) -> Tensor:
    """Look up ``ids`` in a sharded embedding. Returns ``[..., hidden]``, replicated.

    Args:
        weight: local rows, ``[local_vocab, hidden]``.
        layout: layout of the full weight.
        padding_idx: local row without a gradient.

    Raises:
        IndexError: an id is outside the vocabulary.
    """
    ((start, stop),) = layout.ranges[axis.rank]
    elsewhere = ((ids >= 0) & (ids < start)) | ((ids >= stop) & (ids < layout.shape[0]))
    # An id outside the vocabulary stays out of range, so that the lookup raises as it does without sharding.
    rows = F.embedding((ids - start).masked_fill(elsewhere, 0), weight, padding_idx)
    return reduce_from(axis, rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


@shards(VocabParallel)
class VocabParallelModule(_VocabParallel):
    """Layer that calls ``F.embedding``, with a sharded vocabulary. The input is token ids ``[...]``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
            return vocab_parallel_embedding(self.tp, ids, weight, self.layouts["weight"], padding_idx)

        with without_override(), FunctionOverrides({F.embedding: embedding}):
            return super().forward(*args, **kwargs)


@shards(VocabParallel, nn.Linear)
class VocabParallelHead(ShardedModule, nn.Linear):
    """LM head with a sharded vocabulary. Input ``[..., hidden]`` is replicated.

    Returns `VocabParallelLogits`, or the full logits under ``torch.compile``. Dynamo guards the size of a tensor that
    crosses a graph break by its storage, and computes ``nn.CrossEntropyLoss`` without calling ``__torch_function__``.

    Attributes:
        gathers: whether to return the full logits for backward hooks, which compare shapes.
    """

    is_wrapped = True
    takes_parts = True
    gathers = False
    product: ClassVar[Callable[..., Tensor]] = staticmethod(untimed_linear)

    def forward(self, x: Tensor) -> Tensor:
        vocab = self.layouts["weight"]
        with layer_context(self.weight):
            if isinstance(x, ShardedActivation):
                local = product_of_whole(self, x, self.bias)
            else:
                local = self.product(copy_to(self.tp, x), self.weight, self.bias)
        if torch.compiler.is_compiling() or self.gathers:
            return gather_from(self.tp, local, -1, [stop - start for ((start, stop),) in vocab.ranges])
        return VocabParallelLogits.from_local(local, self.tp, vocab)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module calls full backward hooks: its local hooks or global hooks."""
    hooks = torch.nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


class ShardedLogits(Tensor):
    """Tensor that represents full logits ``[..., vocab]`` but stores another tensor, ``[..., n]``, on each rank.

    Attributes:
        tp: axis over which the vocabulary is sharded.
        vocab: layout of the head's weight.
    """

    tp: Axis
    vocab: Layout

    @property
    def vocab_size(self) -> int:
        return self.vocab.shape[0]

    def local(self) -> Tensor:
        """Return the local tensor as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class VocabParallelLogits(ShardedLogits):
    """Logits ``[..., vocab]`` that stay sharded until an operation needs them in full.

    Each rank stores its local shard ``[..., local_vocab]``. transformers' forward computes the loss from these logits.
    ``cross_entropy`` works on the shards, and elementwise operations keep the logits sharded. Every other operation
    gathers the full logits first. So every task head works, and only operations that need full logits gather them.
    """

    @classmethod
    def from_local(cls, local: Tensor, tp: Axis, vocab: Layout) -> VocabParallelLogits:
        """Create logits from the local shard.

        Args:
            local: local shard, ``[..., local_vocab]``.
            tp: axis over which the vocabulary is sharded.
            vocab: layout of the head's weight.
        """
        logits = local.as_subclass(cls)
        logits.tp, logits.vocab = tp, vocab
        return logits

    def full(self) -> Tensor:
        """Gather the full logits, ``[..., vocab]``, as a plain tensor on every rank."""
        return gather_from(self.tp, self.local(), -1, self._shard_sizes())

    def _shard_sizes(self) -> list[int]:
        return [stop - start for ((start, stop),) in self.vocab.ranges]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full().__deepcopy__(memo)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], cls) else None
        if logits is not None:
            if func in PLAIN_FUNCTIONS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _HANDLERS:
                result = _HANDLERS[func](logits, *args[1:], **kwargs)
                if result is not NotImplemented:
                    return result
            if func in _ELEMENTWISE and not any(isinstance(arg, Tensor) and arg.dim() for arg in args[1:]):
                return logits._with_local(func(logits.local(), *args[1:], **kwargs))
        args, kwargs = tree_map(lambda arg: arg.full() if isinstance(arg, cls) else arg, (args, kwargs))
        version = args[0]._version if logits is not None else None
        result = func(*args, **kwargs)
        if logits is not None and args[0]._version != version:  # it modified the logits in place
            logits.local().copy_(scatter_to(logits.tp, args[0], -1, logits._shard_sizes()))
            return logits if result is args[0] else result
        return result

    def _with_local(self, local: Tensor) -> VocabParallelLogits:
        return VocabParallelLogits.from_local(local, self.tp, self.vocab)

    def _of_words(self, vocab: Layout) -> VocabParallelLogits:
        """Return the logits of the first tokens of the vocabulary, with the layout ``vocab``."""
        return VocabParallelLogits.from_local(self.local()[..., : local_words(self.tp, vocab)], self.tp, vocab)

    def _loss(self, target: Tensor, shard: VocabShard, reduction: str) -> Tensor:
        losses = vocab_parallel_cross_entropy(self.local(), target, shard)
        if reduction == "none":
            return losses
        return losses.sum() / (target != shard.ignore_index).sum() if reduction == "mean" else losses.sum()


def local_words(tp: Axis, vocab: Layout) -> int:
    """Return the number of local tokens of a vocabulary."""
    ((start, stop),) = vocab.ranges[tp.rank]
    return stop - start


# Functions for any `ShardedLogits`. They assume that logits and local tensor have the same dimensions except the last,
# and they use `_loss` and `_of_words`.


def _shape(logits: Any) -> torch.Size:
    return torch.Size((*logits.local().shape[:-1], logits.vocab_size))


def _size(logits: Any, dim: int | None = None) -> Any:
    return _shape(logits) if dim is None else _shape(logits)[dim]


def _view(logits: Any, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not sizes or sizes[-1] != logits.vocab_size or not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    local = logits.local()
    return logits._with_local(local.reshape(*sizes[:-1], local.shape[-1]))


def _getitem(logits: Any, index: Any) -> Any:
    """Index without the vocabulary dimension: ``[..., a:b, :]``, ``[:, a:b, :]``, ``[:, a:b]``, or a mask.

    Also keep the first ``n`` tokens, ``[..., :n]``, if every rank has some of them (Inkling pads its head).
    """
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() < logits.local().dim():
        return logits._with_local(logits.local()[index])
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is Ellipsis or isinstance(part, (int, slice))) for part in parts):
        return NotImplemented
    if Ellipsis not in parts and len(parts) < logits.local().dim():
        return logits._with_local(logits.local()[index])
    if len(parts) == 1 or not isinstance(parts[-1], slice) or Ellipsis in parts[1:]:
        return NotImplemented
    start, count, step = parts[-1].indices(logits.vocab_size)
    if (start, step) != (0, 1):
        return NotImplemented
    if count == logits.vocab_size:
        return logits._with_local(logits.local()[(*parts[:-1], slice(None))])
    ranges = [(first, min(last, count)) for ((first, last),) in logits.vocab.ranges]
    if len(parts) > 2 or parts[0] is not Ellipsis or any(first >= last for first, last in ranges):
        return NotImplemented
    return logits._of_words(Layout((count, *logits.vocab.shape[1:]), 0, tuple((each,) for each in ranges)))


def _cross_entropy(
    input: Any,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute ``F.cross_entropy`` of ``[N, vocab]`` logits and class indices. Other cases gather the full logits."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not plain or input.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    (local_range,) = input.vocab.ranges[input.tp.rank]
    shard = VocabShard(input.tp, local_range, input.vocab_size, ignore_index, label_smoothing)
    loss = input._loss(target, shard, reduction)
    return loss if loss is NotImplemented else loss.to(input.dtype)


def _add(logits: VocabParallelLogits, other: Any) -> Any:
    """Add logits with the same layout (LoRA), or one number per token (``final_logits_bias`` of BART)."""
    if isinstance(other, VocabParallelLogits) and other.vocab.ranges == logits.vocab.ranges:
        return logits._with_local(logits.local() + other.local())
    if not isinstance(other, Tensor) or other.shape[-1:] != (logits.vocab_size,):
        return NotImplemented
    return logits._with_local(logits.local() + scatter_to(logits.tp, other, -1, logits._shard_sizes()))


def _mul(logits: VocabParallelLogits, other: Any) -> Any:
    """Multiply by one factor per token (``logit_scale`` of Dory)."""
    if isinstance(other, ShardedLogits) or not isinstance(other, Tensor) or other.shape != (logits.vocab_size,):
        return NotImplemented
    return logits._with_local(logits.local() * scatter_to(logits.tp, other, -1, logits._shard_sizes()))


# Functions that work on any `ShardedLogits` without gathering. Handlers may return NotImplemented.
SHARDED_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    Tensor.size: _size,
    Tensor.shape.__get__: _shape,  # type: ignore[attr-defined]
    Tensor.__getitem__: _getitem,
    F.cross_entropy: _cross_entropy,
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.mul: _mul,
    Tensor.__mul__: _mul,
    **SHARDED_FUNCTIONS,
}
# Applied to the local shard.
_ELEMENTWISE = {
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type),
    *(Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.neg, Tensor.tanh, torch.tanh),
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div),
}
