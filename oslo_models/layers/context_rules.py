"""Rules for torch functions of a `ContextPart`, besides the rules of `ShardedActivation`.

Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from oslo_models.distributed.autograd_collectives import gather_from, reduce_from
from oslo_models.layers import activation_products as activation_products  # registers its rules
from oslo_models.layers import activation_shapes as activation_shapes
from oslo_models.layers.activation_rules import aligned, functions, positive
from oslo_models.layers.context_attention import AttentionInputs, attention_of_parts
from oslo_models.layers.context_parts import CONTEXT_RULES, ContextPart
from oslo_models.layers.sharded_activation import RULES, Rule, ShardSpec


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


def _baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute scores of this rank's queries and the keys of all tokens, added to a bias."""
    if len(args) != 3 or "out" in kwargs or not isinstance(args[1], ContextPart):
        return NotImplemented
    bias, a, b = args
    if a.spec.dim != 1 or (isinstance(b, ContextPart) and b.spec.dim < 1):
        return NotImplemented
    own = aligned(a, bias, -2)
    if own is NotImplemented:
        return NotImplemented
    keys = b.full("keys") if isinstance(b, ContextPart) else a.copy_of(b)
    return a.with_local(func(own, a.local(), keys, **kwargs))


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = (given.pop(name, None) for name in names[:4])
    is_causal, _ = given.pop("is_causal", False), given.pop("enable_gqa", False)

    def attend(local: AttentionInputs) -> Tensor:
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


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor of the same tokens, with any size of the last dimension: ``x.new_zeros(*x.shape[:-1], 4)``."""
    x, *sizes = args
    value: dict[str, Any] = {}
    if func is Tensor.new_full:
        value["fill_value"] = sizes.pop() if len(sizes) > 1 else kwargs.get("fill_value")
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)):
        sizes = list(sizes[0])
    options = {name: option for name, option in kwargs.items() if name in ("dtype", "device")}
    known = len(options) + len(value) * ("fill_value" in kwargs) == len(kwargs)
    if not known or not isinstance(x, ContextPart) or not x.dim() or x.spec.dim == x.dim() - 1:
        return NotImplemented
    if len(sizes) != x.dim() or list(x.full_shape[:-1]) != list(sizes[:-1]):
        return NotImplemented
    return x.with_local(func(x.local(), (*x.local().shape[:-1], sizes[-1]), **value, **options))


def _like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].with_local(func(args[0].local(), *args[1:], **kwargs)) if args else NotImplemented


def _scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``scatter`` along another dimension than the tokens."""
    if len(args) + len(kwargs) != 4 or kwargs.keys() - {"dim", "index", "src", "value"}:
        return NotImplemented
    x, dim, index, source = [*args, *(kwargs[name] for name in ("dim", "index", "src", "value") if name in kwargs)]
    is_scalar = not isinstance(source, Tensor)
    if not all(isinstance(each, ContextPart) for each in (x, index, *([] if is_scalar else [source]))):
        return NotImplemented
    if positive(x, dim) == x.spec.dim or index.spec != x.spec or not (is_scalar or source.spec == x.spec):
        return NotImplemented
    result = func(x.local(), dim, index.local(), source if is_scalar else source.local())
    return x if func in (Tensor.scatter_, Tensor.scatter_add_) else x.with_local(result)


def _one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "num_classes"), args, strict=False)), **kwargs}
    if given.get("num_classes", -1) < 0:
        return NotImplemented
    return given["input"].with_local(func(given["input"].local(), given["num_classes"]))


def _stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stack parts along a new dimension."""
    pieces, dim = list(args[0] if args else kwargs["tensors"]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = pieces[0]
    if "out" in kwargs or not all(isinstance(x, ContextPart) and x.spec == first.spec for x in pieces):
        return NotImplemented
    dim %= first.dim() + 1
    spec = ShardSpec(first.spec.dim + (dim <= first.spec.dim), first.spec.units, first.spec.parts)
    return first.with_local(func([x.local() for x in pieces], dim), spec)


def _as_other(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``x.view_as(other)`` and ``x.reshape_as(other)``."""
    x, other = args
    return x.view(other.shape) if func is Tensor.view_as else x.reshape(other.shape)


def _expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args
    if not isinstance(other, ContextPart):
        return NotImplemented
    own = aligned(other, x, other.spec.dim - other.dim())
    return NotImplemented if own is NotImplemented else other.with_local(own.expand(other.local().shape))


def _complex(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``view_as_complex`` and ``view_as_real``, which remove or add a last dimension."""
    (x,) = args
    return NotImplemented if x.spec.dim == x.dim() - 1 else x.with_local(func(x.local()))


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute norms along another dimension than the tokens, which they keep or which is the last one."""
    given = {**dict(zip(("input", "p", "dim", "keepdim"), args, strict=False)), **kwargs}
    x, dim = given["input"], given.get("dim")
    if func is F.normalize:
        dim = given.get("dim", 1)
    if not isinstance(x, ContextPart) or not isinstance(dim, int) or positive(x, dim) <= x.spec.dim:
        return NotImplemented
    return x.with_local(func(x.local(), *args[1:], **{key: each for key, each in kwargs.items() if key != "input"}))


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Take some tokens, such as a window for a cache or the last one, without the memory of all tokens."""
    if not isinstance(args[0], ContextPart):
        return NotImplemented
    result = RULES[func](func, args, kwargs)
    if result is not NotImplemented:
        return result
    result = _some_tokens(*args)
    if result is not NotImplemented:
        return result
    whole = args[0].full("__getitem__")
    index = tree_map_only(ContextPart, lambda x: x.full("__getitem__"), args[1])
    result = whole[index]
    return result.clone() if 2 * result.numel() <= whole.numel() and result._base is not None else result


def _some_tokens(x: ContextPart, index: Any) -> Any:
    """Index a prompt with slices of all dimensions. Gather only the tokens of the slice."""
    slices, dim = index if isinstance(index, tuple) else (index,), x.spec.dim
    if not x.state.is_prompt or x.spec.parts > 1 or len(slices) <= dim:
        return NotImplemented
    if not all(type(each) is slice for each in slices):
        return NotImplemented
    start, stop, step = slices[dim].indices(x.full_shape[dim])
    if step != 1 or start >= stop:
        return NotImplemented
    starts = list(accumulate(x.sizes(), initial=0))
    sizes = [max(min(stop, end) - max(start, first), 0) for first, end in pairwise(starts)]
    first = starts[x.tp.rank]
    local = slice(max(start - first, 0), max(stop - first, 0))
    return gather_from(x.tp, x.local()[(*slices[:dim], local, *slices[dim + 1 :])], dim, sizes)


def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``gather`` along another dimension than the tokens."""
    given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    x, index = given["input"], given["index"]
    if not isinstance(x, ContextPart) or positive(x, given["dim"]) == x.spec.dim or len(given) > 3:
        return NotImplemented
    if isinstance(index, ContextPart) and index.spec == x.spec:
        return x.with_local(func(x.local(), given["dim"], index.local()))
    if isinstance(index, ContextPart) or index.shape[x.spec.dim] != x.full_shape[x.spec.dim]:
        return NotImplemented
    return x.with_local(func(x.local(), given["dim"], x.slice_of(index, x.spec.dim)))


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate a new cache, which is empty, and keys or values. The cache of a prompt is whole."""
    pieces = [piece for piece in (args[0] if args else kwargs["tensors"]) if tuple(piece.shape) != (0,)]
    if len(pieces) != 1 or "out" in kwargs:
        return NotImplemented
    return pieces[0].full("cache") if pieces[0].state.is_prompt else pieces[0]


_register(_linear, [F.linear])
_register(_addmm, [torch.addmm])
_register(_dropout, [F.dropout, torch.dropout])
_register(_cross_entropy, [F.cross_entropy])
_register(_matmul, [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm])
_register(_baddbmm, [torch.baddbmm, Tensor.baddbmm])
_register(_attention, [F.scaled_dot_product_attention])
_register(_topk, functions(["topk"]))
_register(_gather, functions(["gather"]))
_register(_new, [Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full])
_register(_like, [torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like])
_register(_scatter, [*functions(["scatter", "scatter_add"]), Tensor.scatter_, Tensor.scatter_add_])
_register(_one_hot, [F.one_hot])
_register(_stack, [torch.stack])
_register(_as_other, [Tensor.view_as, Tensor.reshape_as])
_register(_expand_as, [Tensor.expand_as])
_register(_complex, [torch.view_as_complex, torch.view_as_real])
_register(_vector_norm, [Tensor.norm, torch.norm, torch.linalg.vector_norm, torch.linalg.norm, F.normalize])
_register(_getitem, [Tensor.__getitem__])
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
            return self.of_whole_tokens(*args, **kwargs)
        if any(isinstance(x, ContextPart) and x.spec != like.spec for x in given):
            given = [x.full(type(self).__name__) if isinstance(x, ContextPart) else x for x in given]
            return self.of_whole_tokens(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        given = [x.local() if isinstance(x, ContextPart) else x for x in given]
        with self.context_parts.random_stream():
            result = super().forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        shape = like.local().shape[: like.spec.dim + 1]

        def marked(value: Any) -> Any:
            is_part = isinstance(value, Tensor) and value.shape[: len(shape)] == shape
            return like.with_local(value) if is_part else value

        return type(result)(map(marked, result)) if type(result) in (tuple, list) else marked(result)

    def of_whole_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for arguments of all tokens."""
        return super().forward(*args, **kwargs)
