"""A language-model head that returns lazy logits, which are computed on first use.

The cross entropy does not need them: `linear_cross_entropy` computes it from the hidden states and the head's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from oslo_models.distributed.autograd_collectives import copy_to, scatter_to
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.linear_cross_entropy import linear_cross_entropy
from oslo_models.fusion.modules import FusedLinear, FusedProduct
from oslo_models.layers.cross_entropy import VocabShard
from oslo_models.layers.plain_functions import PLAIN_FUNCTIONS
from oslo_models.layers.vocab_parallel import (
    SHARDED_FUNCTIONS,
    ShardedLogits,
    VocabParallelHead,
    VocabParallelLogits,
    local_words,
)
from oslo_models.sharding.layout import Layout

SMALL = 4 << 20
"""The maximum bytes of a rank's logits for which a CPU is faster with separate logits and loss."""


class LazyHead(FusedProduct, nn.Linear):
    """A head that returns `LazyLogits` while ``lazy`` is true, and otherwise the logits of the replaced class."""

    tp: Axis
    layouts: dict[str, Layout]
    lazy: bool

    def forward(self, x: Tensor) -> Tensor:
        # If FSDP wraps the head itself, it frees the full weight after this forward.
        if not self.lazy or torch.compiler.is_compiling() or isinstance(self, FSDPModule):
            return super().forward(x)
        return LazyLogits.from_hidden(x, self)


class LazyFullHead(LazyHead, FusedLinear):
    """`LazyHead` with the full vocabulary on every rank."""


class LazyVocabParallelHead(LazyHead, VocabParallelHead):
    """`LazyHead` with this rank's shard of the vocabulary."""


class LazyLogits(ShardedLogits):
    """Uncomputed logits ``[..., vocab]``: the hidden states ``[..., hidden]`` and the head to apply to them.

    The loss and the operations before it use the hidden states. Any other operation computes the logits first.

    Attributes:
        logits_dtype: the dtype of the logits. It may be wider than the dtype of the hidden states.
        bias: the bias of the head, or a bias added to the logits later.
        scale, cap: the logits are ``x = scale * output`` of the head, or ``cap * tanh(x)`` unless ``cap`` is zero.
        computed: the logits, once an operation has needed them.
    """

    head: LazyHead
    logits_dtype: torch.dtype
    bias: Tensor | None
    scale: float
    cap: float
    computed: Tensor | None

    @classmethod
    def from_hidden(cls, hidden: Tensor, head: LazyHead) -> LazyLogits:
        """Return the lazy logits of these hidden states."""
        if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        logits = hidden.as_subclass(cls)
        logits.head, logits.logits_dtype, logits.bias = head, hidden.dtype, head.bias
        logits.scale, logits.cap = 1.0, 0.0
        logits.computed, logits.tp, logits.vocab = None, head.tp, head.layouts["weight"]
        return logits

    def changed(self, hidden: Tensor | None = None, **attributes: Any) -> LazyLogits:
        """Return a copy of these logits with other attributes."""
        logits: Any = LazyLogits.from_hidden(self.local() if hidden is None else hidden, self.head)
        kept = {name: getattr(self, name) for name in ("logits_dtype", "bias", "scale", "cap", "vocab")}
        vars(logits).update({**kept, **attributes})
        return logits

    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the dtype of the hidden states, which autocast may have changed."""
        weight, bias, dtype = self.head.weight, self.bias, self.local().dtype
        count = local_words(self.tp, self.vocab)
        with without_override():
            if count < len(weight):
                weight, bias = weight[:count], None if bias is None else bias[:count]
            return weight.to(dtype), None if bias is None else bias.to(dtype)

    def _with_local(self, hidden: Tensor) -> LazyLogits:
        return self.changed(hidden)

    def _of_words(self, vocab: Layout) -> LazyLogits:
        return self.changed(vocab=vocab)

    def _loss(self, target: Tensor, shard: VocabShard, reduction: str) -> Any:
        """Return the sum or mean of the losses. Losses per row (``reduction="none"``) need the logits."""
        if reduction == "none" or self._are_small(target.numel()):
            return NotImplemented
        with without_override():
            weight, bias = self._parameters()
            mean = reduction == "mean"
            options = (self.scale, self.cap, mean, self.head.faster)
            return linear_cross_entropy(self.local(), weight, bias, target, shard, *options)

    def _are_small(self, rows: int) -> bool:
        """Return whether a CPU is faster with separate logits and loss. True only if `fuse` has measured."""
        measured = self.local().is_cpu and self.head.faster is not None
        return measured and rows * self.vocab_size * self.logits_dtype.itemsize <= SMALL * self.tp.size

    def compute(self) -> Tensor:
        """Return the logits, sharded if the vocabulary is. Compute them once, so that in-place changes persist."""
        if self.computed is None:
            hidden = copy_to(self.tp, self.local())
            with without_override():
                logits = F.linear(hidden, *self._parameters()).to(self.logits_dtype)
            logits = logits if self.scale == 1.0 else logits * self.scale
            self.computed = self.cap * logits.tanh() if self.cap else logits
            if self.tp.size > 1:
                self.computed = VocabParallelLogits.from_local(self.computed, self.tp, self.vocab)
        return self.computed

    def full(self) -> Tensor:
        """Return the full logits, ``[..., vocab]``, as a plain tensor on every rank."""
        logits = self.compute()
        return logits.full() if isinstance(logits, VocabParallelLogits) else logits

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], cls) else kwargs.get("input")
        if isinstance(logits, cls) and logits.computed is None:
            if func in _SAME_FOR_HIDDEN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _HANDLERS:
                result = _HANDLERS[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
        args, kwargs = tree_map(lambda arg: arg.compute() if isinstance(arg, cls) else arg, (args, kwargs))
        return func(*args, **kwargs)


def _float(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return logits.changed(logits_dtype=torch.float32)


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """``to`` a wider dtype, or ``to`` the current device."""
    if kwargs or len(args) != 1:
        return NotImplemented
    if isinstance(args[0], torch.dtype) and torch.promote_types(args[0], logits.logits_dtype) == args[0]:
        return logits.changed(logits_dtype=args[0])
    return logits if args[0] in (logits.logits_dtype, logits.local().device) else NotImplemented


def _mul(logits: LazyLogits, factor: Any) -> Any:
    """Multiply by a number (Cohere, Granite), before or after a cap (Gemma 2)."""
    if not isinstance(factor, (int, float)) or not factor:
        return NotImplemented
    return logits.changed(cap=logits.cap * factor) if logits.cap else logits.changed(scale=logits.scale * factor)


def _div(logits: LazyLogits, divisor: Any, **kwargs: Any) -> Any:
    is_number = isinstance(divisor, (int, float)) and divisor != 0 and not kwargs
    return _mul(logits, 1 / divisor) if is_number else NotImplemented


def _tanh(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Apply a soft cap (Gemma 2): one tanh, between two factors."""
    return NotImplemented if args or kwargs or logits.cap else logits.changed(cap=1.0)


def _add(logits: LazyLogits, other: Any) -> Any:
    """Add one number per token of the vocabulary (LXMERT, BART) as a bias of the head."""
    size = logits.vocab_size
    if not isinstance(other, Tensor) or other.shape[-1:] != (size,) or other.numel() != size or logits.bias is not None:
        return NotImplemented
    if logits.cap or logits.scale != 1.0:
        return NotImplemented
    sizes = [stop - start for ((start, stop),) in logits.vocab.ranges]
    return logits.changed(bias=scatter_to(logits.tp, other.flatten(), -1, sizes))


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_SAME_FOR_HIDDEN = PLAIN_FUNCTIONS - {_DTYPE, Tensor.register_hook}  # equal for hidden states and logits
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **SHARDED_FUNCTIONS,
    Tensor.float: _float,
    Tensor.to: _to,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _mul),
    **dict.fromkeys((Tensor.add, Tensor.__add__), _add),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _div),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    Tensor.contiguous: lambda logits, **kwargs: logits,
    _DTYPE: lambda logits: logits.logits_dtype,
}
