"""Rules for torch functions of a `ContextPart`, besides the rules of `ShardedActivation`.

Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.layers import activation_products as activation_products  # registers its rules
from oslo_models.layers import activation_shapes as activation_shapes
from oslo_models.layers.activation_rules import functions, positive
from oslo_models.layers.context_attention import LocalHeads, attention_of_parts
from oslo_models.layers.context_parts import CONTEXT_RULES, ContextPart
from oslo_models.layers.sharded_activation import Rule


def _register(rule: Rule, functions: Iterable[Any]) -> None:
    CONTEXT_RULES.update(dict.fromkeys(functions, rule))


def _linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if not isinstance(x, ContextPart) or x.spec.dim == x.dim() - 1 or isinstance(weight, ContextPart):
        return NotImplemented
    return x.with_local(func(x.local(), x.copy_of(weight), None if bias is None else x.copy_of(bias)))


def _addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the product of ``Conv1D``: rows of tokens with a whole weight."""
    if len(args) != 3 or kwargs:
        return NotImplemented
    bias, x, weight = args
    if not isinstance(x, ContextPart) or x.spec.dim or isinstance(bias, ContextPart) or isinstance(weight, ContextPart):
        return NotImplemented
    if bias.dim() != 1:
        return NotImplemented
    return x.with_local(func(x.copy_of(bias), x.local(), x.copy_of(weight)))


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop elements of the local tokens. Each rank draws other random numbers."""
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    x = given["input"]
    if not given["training"] or given["p"] == 0.0:
        return x
    with x.state.random_stream():
        return x.with_local(func(x.local(), given["p"], True))


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum the losses of the local rows, and all-reduce the sum."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x, target = given["input"], given["target"]
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    if not isinstance(x, ContextPart) or x.state.is_inside or x.dim() != 2 or x.spec.dim or x.shape[0] != len(target):
        return NotImplemented
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")) or target.dim() != 1:
        return NotImplemented
    if isinstance(target, ContextPart) or target.is_floating_point() or reduction not in ("mean", "sum"):
        return NotImplemented
    options = {"ignore_index": ignored, "label_smoothing": given.get("label_smoothing", 0.0), "reduction": "sum"}
    total = reduce_from(x.tp, func(x.local(), x.slice_of(target, 0), **options))
    return total if reduction == "sum" else total / (target != ignored).sum()


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute products of this rank's queries with the keys or values of all tokens."""
    if len(args) != 2 or kwargs or not all(isinstance(x, ContextPart) for x in args):
        return NotImplemented
    a, b = args
    if min(a.dim(), b.dim()) < 3 or a.spec.dim != a.dim() - 2 or b.spec.dim < b.dim() - 2:
        return NotImplemented
    return a.with_local(func(a.local(), b.full("keys")))


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = (given.pop(name, None) for name in names[:4])
    is_causal, _ = given.pop("is_causal", False), given.pop("enable_gqa", False)

    def attend(local: LocalHeads) -> Tensor:
        options = {**given, "enable_gqa": local.groups > 1, "is_causal": local.is_causal}
        return func(local.query, local.key, local.value, attn_mask=local.mask, **options)

    return attention_of_parts(attend, query, key, value, mask, is_causal, heads_dim=1)


def _topk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)), **kwargs}
    x = given.pop("input")
    if not isinstance(x, ContextPart) or "out" in given or positive(x, given.get("dim", -1)) == x.spec.dim:
        return NotImplemented
    result = func(x.local(), **given)
    return type(result)([x.with_local(each) for each in result])


def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``gather`` along another dimension than the tokens."""
    given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    x, index = given["input"], given["index"]
    both = isinstance(x, ContextPart) and isinstance(index, ContextPart) and x.spec == index.spec
    if not both or positive(x, given["dim"]) == x.spec.dim or len(given) > 3:
        return NotImplemented
    return x.with_local(func(x.local(), given["dim"], index.local()))


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate a new cache, which is empty, and keys or values."""
    pieces = [piece for piece in (args[0] if args else kwargs["tensors"]) if tuple(piece.shape) != (0,)]
    return pieces[0] if len(pieces) == 1 and "out" not in kwargs else NotImplemented


_register(_linear, [F.linear])
_register(_addmm, [torch.addmm])
_register(_dropout, [F.dropout, torch.dropout])
_register(_cross_entropy, [F.cross_entropy])
_register(_matmul, [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm])
_register(_attention, [F.scaled_dot_product_attention])
_register(_topk, functions(["topk"]))
_register(_gather, functions(["gather"]))
_register(_cat, [torch.cat, torch.concat])


class LocalTokensModule(nn.Module):
    """Mixin before the class of a module that computes each token alone: computes the local tokens of a part.

    Attributes:
        context_parts: state of the model's parts.
    """

    context_parts: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        like = next((x for x in given if isinstance(x, ContextPart)), None)
        if like is None:
            return super().forward(*args, **kwargs)
        if any(isinstance(x, ContextPart) and x.spec != like.spec for x in given):
            given = [x.full(type(self).__name__) if isinstance(x, ContextPart) else x for x in given]
            return super().forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        given = [x.local() if isinstance(x, ContextPart) else x for x in given]
        with self.context_parts.random_stream():
            result = super().forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        shape = like.local().shape[: like.spec.dim + 1]

        def marked(value: Any) -> Any:
            is_part = isinstance(value, Tensor) and value.shape[: len(shape)] == shape
            return like.with_local(value) if is_part else value

        return type(result)(map(marked, result)) if type(result) in (tuple, list) else marked(result)
