"""Embedding, language-model head and logits with a vocabulary that is sharded over the tp axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from oslo_kernels.linear import many_rows_linear
from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import layer_context, without_override
from oslo_models.layers.cross_entropy import VocabShard, vocab_parallel_cross_entropy
from oslo_models.sharding.layout import Layout


class VocabParallelEmbedding(nn.Embedding):
    """``nn.Embedding`` with a sharded vocabulary. Input: token ids ``[...]``; output ``[..., hidden]``, replicated."""

    tp: Axis
    layouts: dict[str, Layout]

    def forward(self, ids: Tensor) -> Tensor:
        with without_override():
            return vocab_parallel_embedding(self.tp, ids, self.weight, self.layouts["weight"], self.padding_idx)


def vocab_parallel_embedding(
    axis: Axis, ids: Tensor, weight: Tensor, layout: Layout, padding_idx: int | None
) -> Tensor:
    """Look up ``ids`` in a sharded embedding; returns ``[..., hidden]``, replicated.

    Args:
        weight: this rank's rows, ``[local_vocab, hidden]``.
        layout: which rows those are.
        padding_idx: the local row that gets no gradient.

    Raises:
        IndexError: an id is outside the vocabulary.
    """
    ((start, stop),) = layout.ranges[axis.rank]
    elsewhere = ((ids >= 0) & (ids < start)) | ((ids >= stop) & (ids < layout.shape[0]))
    # An id outside the vocabulary stays out of range, so that the lookup raises as it does without sharding.
    rows = F.embedding((ids - start).masked_fill(elsewhere, 0), weight, padding_idx)
    return reduce_from(axis, rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class VocabParallelHead(nn.Linear):
    """A language-model head with a sharded vocabulary. Input ``[..., hidden]`` is replicated.

    Returns `VocabParallelLogits`; under ``torch.compile``, the full logits: dynamo guards the size of a tensor that
    crosses a graph break by its storage, and computes ``nn.CrossEntropyLoss`` without asking ``__torch_function__``.

    Attributes:
        gathers: whether it returns the full logits for backward hooks, which compare shapes.
    """

    tp: Axis
    layouts: dict[str, Layout]
    gathers = False
    product: ClassVar[Callable[..., Tensor]] = staticmethod(many_rows_linear)

    def forward(self, x: Tensor) -> Tensor:
        vocab = self.layouts["weight"]
        with layer_context(self.weight):
            local = self.product(copy_to(self.tp, x), self.weight, self.bias)
        if torch.compiler.is_compiling() or self.gathers:
            return gather_from(self.tp, local, -1, [stop - start for ((start, stop),) in vocab.ranges])
        return VocabParallelLogits.from_local(local, self.tp, vocab)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module calls full backward hooks, of its own or of all modules."""
    hooks = torch.nn.modules.module
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


class ShardedLogits(Tensor):
    """A tensor that stands for full logits ``[..., vocab]`` but stores something else, ``[..., n]``, on each rank.

    Attributes:
        tp: the axis over which the vocabulary is sharded.
        vocab: how it is sharded: the layout of the head's weight.
    """

    tp: Axis
    vocab: Layout

    @property
    def vocab_size(self) -> int:
        return self.vocab.shape[0]

    def local(self) -> Tensor:
        """What this rank stores, as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


class VocabParallelLogits(ShardedLogits):
    """Logits ``[..., vocab]`` of which each rank stores its shard ``[..., local_vocab]`` until all are needed.

    transformers' own forward computes the loss from them. ``cross_entropy`` works on the shards, elementwise operations
    keep the logits sharded, and every other operation gathers the full logits first. So every head works, and
    communication is limited to what an operation needs.
    """

    @classmethod
    def from_local(cls, local: Tensor, tp: Axis, vocab: Layout) -> VocabParallelLogits:
        """Make logits from this rank's shard.

        Args:
            local: the shard, ``[..., local_vocab]``.
            tp: the axis over which the vocabulary is sharded.
            vocab: how it is sharded: the layout of the head's weight.
        """
        logits = local.as_subclass(cls)
        logits.tp, logits.vocab = tp, vocab
        return logits

    def full(self) -> Tensor:
        """The full logits, ``[..., vocab]``, as a plain tensor on every rank."""
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
        """The logits of the first words, which are sharded so."""
        return VocabParallelLogits.from_local(self.local()[..., : local_words(self.tp, vocab)], self.tp, vocab)

    def _loss(self, target: Tensor, shard: VocabShard, reduction: str) -> Tensor:
        losses = vocab_parallel_cross_entropy(self.local(), target, shard)
        if reduction == "none":
            return losses
        return losses.sum() / (target != shard.ignore_index).sum() if reduction == "mean" else losses.sum()


def local_words(tp: Axis, vocab: Layout) -> int:
    """How many words of a vocabulary this rank has."""
    ((start, stop),) = vocab.ranges[tp.rank]
    return stop - start


# Functions for any `ShardedLogits`: they rely only on all dimensions but the last being those of the stored tensor,
# and on `_loss` and `_of_words`.


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
    """Indexing that keeps the whole vocabulary: ``[..., a:b, :]`` or fewer plain indices than dimensions.

    Or its first words, ``[..., :n]``, if some of them are on every rank (Inkling pads its head).
    """
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is Ellipsis or isinstance(part, (int, slice))) for part in parts):
        return NotImplemented
    if Ellipsis not in parts and len(parts) < logits.local().dim():
        return logits._with_local(logits.local()[index])
    if parts[0] is not Ellipsis or len(parts) == 1 or not isinstance(parts[-1], slice):
        return NotImplemented
    start, count, step = parts[-1].indices(logits.vocab_size)
    if (start, step) != (0, 1):
        return NotImplemented
    if count == logits.vocab_size:
        return logits._with_local(logits.local()[(*parts[:-1], slice(None))])
    ranges = [(first, min(last, count)) for ((first, last),) in logits.vocab.ranges]
    if len(parts) > 2 or any(first >= last for first, last in ranges):
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
    """``F.cross_entropy`` of ``[N, vocab]`` logits and class indices; other cases gather the full logits."""
    plain = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if not plain or input.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    (local_range,) = input.vocab.ranges[input.tp.rank]
    shard = VocabShard(input.tp, local_range, input.vocab_size, ignore_index, label_smoothing)
    loss = input._loss(target, shard, reduction)
    return loss if loss is NotImplemented else loss.to(input.dtype)


def _add(logits: VocabParallelLogits, other: Any) -> Any:
    """Adding logits of the same shards (those of LoRA), or one number per entry (``final_logits_bias`` of BART)."""
    if isinstance(other, VocabParallelLogits) and other.vocab.ranges == logits.vocab.ranges:
        return logits._with_local(logits.local() + other.local())
    if not isinstance(other, Tensor) or other.shape[-1:] != (logits.vocab_size,):
        return NotImplemented
    return logits._with_local(logits.local() + scatter_to(logits.tp, other, -1, logits._shard_sizes()))


# Functions of any `ShardedLogits` that need no full logits; the handlers may return NotImplemented.
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
    **SHARDED_FUNCTIONS,
}
# Applied to the local shard.
_ELEMENTWISE = {
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type),
    *(Tensor.contiguous, Tensor.clone, Tensor.detach, Tensor.neg, Tensor.tanh, torch.tanh),
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div),
}
# Called on the tensor itself, as they do not depend on the size of the last dimension.
PLAIN_FUNCTIONS = {
    *(Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.register_hook, Tensor.get_device),
    Tensor.is_contiguous,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "layout", "ndim", "is_meta")
    ),
}
