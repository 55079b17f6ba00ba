"""A language-model head that waits: asked for logits, it gives what they would be made of, until someone looks at them.

A loss does not need to look: it is computed from what the logits would be made of, by `linear_cross_entropy`.
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
from oslo_models.fusion.linear_cross_entropy import linear_cross_entropy
from oslo_models.fusion.modules import FusedLinear, FusedProduct
from oslo_models.layers.cross_entropy import VocabShard
from oslo_models.layers.vocab_parallel import (
    PLAIN_FUNCTIONS,
    SHARDED_FUNCTIONS,
    ShardedLogits,
    VocabParallelHead,
    VocabParallelLogits,
)
from oslo_models.sharding.layout import Layout


class LazyHead(nn.Linear):
    """A head that makes `LazyLogits` while ``deferring``, and the logits of its class before it otherwise."""

    tp: Axis
    layouts: dict[str, Layout]
    deferring: bool

    def forward(self, x: Tensor) -> Tensor:
        # FSDP gives the weight of a head that it wraps by itself away when this forward ends.
        if not self.deferring or torch.compiler.is_compiling() or isinstance(self, FSDPModule):
            return super().forward(x)
        return LazyLogits.from_local(x, self)


class LazyFullHead(LazyHead, FusedLinear):
    """`LazyHead` over all words."""


class LazyVocabParallelHead(FusedProduct, LazyHead, VocabParallelHead):
    """`LazyHead` over a part of the vocabulary."""


class LazyLogits(ShardedLogits):
    """Logits ``[..., vocab]`` that do not exist: the hidden states ``[..., hidden]``, and the head to apply to them.

    As in `VocabParallelLogits`, the loss and what leads to it are known; anything else makes the logits first.
    """

    head: LazyHead
    kind: torch.dtype
    bias: Tensor | None
    made: Tensor | None

    @classmethod
    def from_local(
        cls, hidden: Tensor, head: LazyHead, kind: torch.dtype | None = None, bias: Tensor | None = None
    ) -> LazyLogits:
        """Logits of the type ``kind`` with ``bias`` (default: as ``head`` would make them)."""
        if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        logits = hidden.as_subclass(cls)
        logits.head, logits.kind, logits.made = head, kind or hidden.dtype, None
        logits.bias = head.bias if bias is None else bias
        logits.tp, logits.vocab = head.tp, head.layouts["weight"]
        return logits

    def _parameters(self) -> tuple[Tensor, Tensor | None]:
        weight, bias, kind = self.head.weight, self.bias, self.local().dtype
        return weight.to(kind), None if bias is None else bias.to(kind)

    def _with_local(self, hidden: Tensor) -> LazyLogits:
        return LazyLogits.from_local(hidden, self.head, self.kind, self.bias)

    def _losses(self, target: Tensor, words: VocabShard, reduction: str) -> Any:
        """Their sum only; one by one they need the logits."""
        if reduction == "none":
            return NotImplemented
        return linear_cross_entropy(self.local(), *self._parameters(), target, words)

    def make(self) -> Tensor:
        """The logits: divided where the vocabulary is. They are made once, so that changes in place stay."""
        if self.made is None:
            self.made = F.linear(copy_to(self.tp, self.local()), *self._parameters()).to(self.kind)
            if self.tp.size > 1:
                self.made = VocabParallelLogits.from_local(self.made, self.tp, self.vocab)
        return self.made

    def full(self) -> Tensor:
        """The full logits, ``[..., vocab]``, as a plain tensor on every rank."""
        made = self.make()
        return made.full() if isinstance(made, VocabParallelLogits) else made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args and isinstance(args[0], cls) else kwargs.get("input")
        if isinstance(logits, cls) and logits.made is None:
            if func in _OF_HIDDEN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _HANDLERS:
                result = _HANDLERS[func](*args, **kwargs)
                if result is not NotImplemented:
                    return result
        args, kwargs = tree_map(lambda arg: arg.make() if isinstance(arg, cls) else arg, (args, kwargs))
        return func(*args, **kwargs)


def _float(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    return LazyLogits.from_local(logits.local(), logits.head, torch.float32, logits.bias)


def _to(logits: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """``to`` another type, wider than that of the hidden states, or to where it is."""
    if kwargs or len(args) != 1:
        return NotImplemented
    if isinstance(args[0], torch.dtype) and torch.promote_types(args[0], logits.kind) == args[0]:
        return LazyLogits.from_local(logits.local(), logits.head, args[0], logits.bias)
    return logits if args[0] in (logits.kind, logits.local().device) else NotImplemented


def _mul(logits: LazyLogits, factor: Any) -> Any:
    """A product with a number (Cohere, Granite), made of the hidden states instead."""
    if not isinstance(factor, (int, float)) or logits.bias is not None:
        return NotImplemented
    return LazyLogits.from_local(logits.local() * factor, logits.head, logits.kind)


def _div(logits: LazyLogits, divisor: Any, **kwargs: Any) -> Any:
    plain = isinstance(divisor, (int, float)) and divisor != 0 and not kwargs
    return _mul(logits, 1 / divisor) if plain else NotImplemented


def _add(logits: LazyLogits, other: Any) -> Any:
    """A sum with a number for each word (LXMERT, BART) is a bias of the head."""
    size = logits.vocab_size
    if not isinstance(other, Tensor) or other.shape[-1:] != (size,) or other.numel() != size or logits.bias is not None:
        return NotImplemented
    sizes = [stop - start for ((start, stop),) in logits.vocab.ranges]
    return LazyLogits.from_local(
        logits.local(), logits.head, logits.kind, scatter_to(logits.tp, other.flatten(), -1, sizes)
    )


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_OF_HIDDEN = PLAIN_FUNCTIONS - {_DTYPE, Tensor.register_hook}  # what is the same of hidden states and of logits
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **SHARDED_FUNCTIONS,
    Tensor.float: _float,
    Tensor.to: _to,
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul), _mul),
    **dict.fromkeys((Tensor.add, Tensor.__add__), _add),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, torch.div), _div),
    Tensor.contiguous: lambda logits, **kwargs: logits,
    _DTYPE: lambda logits: logits.kind,
}
