"""Parameters that know that they are shards, so that tools which handle parameters themselves are right or refused.

An optimizer, a checkpoint library or a function that clips gradients sees a shard as an ordinary parameter. Those that
work element by element are right. For the others, `ShardedParameter` and the tensors derived from it (its gradient, the
states of optimizers, what ``state_dict()`` returns) answer torch's own protocols:

* norms of gradients are those of the full model (``torch.nn.utils.clip_grad_norm_``, and all that call it);
* ``torch.distributed.checkpoint`` saves and loads them as chunks of full tensors, at any parallel sizes;
* products with the weight of a shard outside of its layer are refused, and those with gradients reported once.

Everything else runs on the local tensor, as if the class were not there.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oslo_models.distributed import checkpoint_chunks
from oslo_models.distributed.callers import require_replicas_in_fully_shard
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.partial_norm import norm_of_parts, partial_norm
from oslo_models.sharding.layout import Layout, Range

without_override = torch._C.DisableTorchFunctionSubclass
"""A context in which shards are plain tensors, at no cost: the layers that own them compute in it."""


def layer_context(weight: Tensor) -> Any:
    """The context in which a layer computes with its weight.

    It is `without_override`, unless the class of the weight is of another library, such as torchao's quantised ones,
    whose override does the computation. Classes without an override compute below it (`__torch_dispatch__`).
    """
    is_plain = isinstance(weight, _Parameter) or type(weight) in _PLAIN or _has_no_override(weight)
    return without_override() if is_plain else nullcontext()


def _has_no_override(weight: Tensor) -> bool:
    return type(weight).__torch_function__ is torch._C._disabled_torch_function_impl


_PLAIN = (Tensor, nn.Parameter)
_GRAD: Any = Tensor.grad


class ShardWarning(UserWarning):
    """A shard is used as a matrix of its own, with another result than that of the full matrix."""


@dataclass(frozen=True)
class Sharding:
    """What a tensor is a shard of.

    Attributes:
        name: the name of the parameter in the full model.
        layout: its layout over the tp axis.
        mesh: the axes of the model.
        counts: whether this stage's copy is the one that counts in norms; tied weights are on several stages.
    """

    name: str
    layout: Layout
    mesh: ParallelMesh
    counts: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self  # a copied model lives on the same ranks

    def __str__(self) -> str:
        tp, dim = self.mesh.tp, self.layout.dim
        if dim is None:
            return f"{self.name}, replicated, tensor-parallel rank {tp.rank} of {tp.size}"
        rank = self.mesh.rank_in(self.layout)
        held, shape = _said(self.layout.ranges[rank]), tuple(self.layout.shape)
        if self.layout.first_ranges:
            held = f"{_said(self.layout.first_ranges[rank])} of dimension 0 and {held}"
        return f"{self.name}, {held} of dimension {dim} of {shape}, {self.axis.name} rank {rank} of {self.axis.size}"

    @property
    def axis(self) -> Axis:
        """The ranks over which the tensor is sharded."""
        return self.mesh.experts if self.mesh.is_over_replicas(self.layout) else self.mesh.tp

    def counted(self, local: Tensor) -> list[Tensor]:
        """The slices of a local tensor that this rank contributes to a norm in which each element counts once."""
        owned = self.layout.owned_indices(self.axis.rank) if self.counts else []
        return [local[here] for _, here in owned]


def _said(ranges: Sequence[Range]) -> str:
    return " and ".join(f"{start}:{stop}" for start, stop in ranges)


class Shard(Tensor):
    """This rank's part of a full tensor, or its copy of a replicated one.

    Attributes:
        sharding: what it is a part of.
        is_weight: whether it has the values of a parameter, and not of a gradient or a state of an optimizer.
        has_plain_storage: kernels that read memory may read it as that of a plain tensor.
    """

    sharding: Sharding
    is_weight = False
    has_plain_storage: ClassVar[bool] = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # While torch.compile traces a model, all shards are in their layers. Modes are disabled too: with one that is
        # active (torch.set_default_device), dynamo comes here again and again for an attribute such as weight.dtype.
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, *_with_first(args, kwargs or {}))
        with without_override():
            return func(*args, **(kwargs or {}))

    def full_tensor(self) -> Tensor:
        """The full tensor, on every rank of the tensor-parallel group. A collective of them."""
        return gather_shards(self.sharding.axis, local_tensor(self), self.sharding.layout)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """``copy.set_(storage, offset, x.size(), x.stride())``, where ``x.size()`` may be the full size; see `_size`.

        A method, since torch does not pass this function to ``__torch_function__``.
        """
        if type(self) is Shard and len(args) > 2 and tuple(args[2]) == tuple(self.sharding.layout.shape):
            args = (*args[:2], self.sharding.layout.local_shape(self.sharding.axis.rank), *args[3:])
        return super().set_(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.sharding}):\n{local_tensor(self)!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = local_tensor(self).clone(memory_format=torch.preserve_format)
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
            memo[id(self)] = mark(copied, self.sharding, type(self))
            vars(copied).update({name: value for name, value in vars(self).items() if name != "sharding"})
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a plain tensor: what unpickles it may run on other ranks, or on none."""
        local = local_tensor(self)
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (local, self.requires_grad, OrderedDict())
        return local.__reduce_ex__(protocol)

    # torch.distributed.checkpoint's protocol for tensors that are parts of others

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return checkpoint_chunks.write_items(fqn, local_tensor(self), *self._layout_and_rank())

    def __create_chunk_list__(self) -> list[Any]:
        return checkpoint_chunks.chunks(*self._layout_and_rank())

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return checkpoint_chunks.values_of(index, local_tensor(self), *self._layout_and_rank())

    def _layout_and_rank(self) -> tuple[Layout, int]:
        return self.sharding.layout, self.sharding.axis.rank


class WeightView(Tensor):
    """A transposed or indexed weight of a shard, outside of its layer: products with it are refused too.

    Attributes:
        sharding: what the weight is a part of.
    """

    sharding: Sharding

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS_OF_VIEWS.get(func)
        if handler is not None and not torch.compiler.is_compiling():
            return handler(func, *_with_first(args, kwargs or {}))
        with without_override():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_override():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class GradientShard(Shard):
    """The gradient of a `Shard`."""


class _Parameter(nn.Parameter):
    """A parameter whose gradient is a `GradientShard`."""

    sharding: Sharding
    has_plain_storage: ClassVar[bool] = True

    @property
    def grad(self) -> Tensor | None:
        """As of any parameter."""
        with without_override():
            grad: Tensor | None = _GRAD.__get__(self)
        return mark(grad, self.sharding, GradientShard) if type(grad) is Tensor else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with without_override():
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        with without_override():
            _GRAD.__delete__(self)


class ShardedParameter(Shard, _Parameter):
    """This rank's part of a parameter that is sharded over the tensor-parallel group."""


class ReplicatedParameter(_Parameter):
    """A parameter of which every rank of the tensor-parallel group has a copy: an ordinary one but for its gradient."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with without_override():
            copied = memo.setdefault(id(self), super().__deepcopy__(memo))
        return mark(copied, self.sharding, type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())


def mark(tensor: Any, sharding: Sharding, cls: type) -> Any:
    """Make ``tensor`` an instance of ``cls``, in place: optimizers and modules refer to the object."""
    tensor.__class__ = cls
    tensor.sharding = sharding
    return tensor


def mark_parameter(param: nn.Parameter, sharding: Sharding) -> None:
    """Let a parameter know its sharding, in place; one whose class is of another library stays as it is."""
    if type(param) is not nn.Parameter and not isinstance(param, _Parameter):
        return
    is_full = sharding.layout.dim is None or sharding.axis.size == 1
    mark(param, sharding, ReplicatedParameter if is_full else ShardedParameter)


def mark_buffer(module: nn.Module, leaf: str, sharding: Sharding) -> None:
    """Let ``state_dict`` return a sharded buffer as a `Shard`; the module computes with a plain tensor."""
    module.register_state_dict_post_hook(partial(_mark_value, leaf, sharding))


def _mark_value(leaf: str, sharding: Sharding, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    if (value := state.get(prefix + leaf)) is not None:
        state[prefix + leaf] = mark(value.detach(), sharding, Shard)


def unmark_parameter(param: Any) -> None:
    """Make a parameter that was marked a plain one again, in place."""
    if isinstance(param, _Parameter):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    for name in ("sharding", "ds_pipe_replicated", "model_parallel"):
        vars(param).pop(name, None)


def local_tensor(tensor: Tensor) -> Tensor:
    """The elements of a shard as a plain tensor that shares their memory, without gradients."""
    with without_override():
        return tensor.detach().as_subclass(Tensor) if isinstance(tensor, Shard) else tensor


@torch.no_grad()
def gather_shards(axis: Axis, shard: Tensor, layout: Layout) -> Tensor:
    """The full tensor, bit for bit, on every rank of the axis. A collective of them."""
    if layout.dim is None:
        return shard.clone()
    full = shard.new_zeros(layout.shape)
    for there, here in layout.owned_indices(axis.rank):
        full[there] = shard[here]
    # Bytes are summed, not numbers: -0.0 + 0.0 is 0.0.
    all_reduce(axis, full.view(torch.uint8) if full.dim() else full)
    return full


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with the first one by position, where handlers look for it: ``torch.clone(input=x)``."""
    name = None if args else next((name for name in _FIRST_ARGUMENTS if name in kwargs), None)
    if name is None:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


_FIRST_ARGUMENTS = ("input", "self", "x", "A", "equation", "a")
"""The names that torch gives the first argument of the functions that are handled."""


# Norms ----------------------------------------------------------------------------------------------------------------


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``vector_norm(x, ord, dim, keepdim, dtype)`` and its older forms ``norm(x, p, dim, keepdim, dtype)``."""
    shard, *more = args
    names = ("ord" if func is torch.linalg.vector_norm or func is torch.linalg.norm else "p", "dim", "keepdim")
    given = {**dict(zip(names, more, strict=False)), **kwargs}
    order, dim = given.get(names[0]), given.get("dim")
    is_spectral = func is torch.linalg.norm and order is not None and shard.dim() == 2
    order = 2.0 if order is None or order == "fro" else order
    if not isinstance(shard, Shard) or dim is not None or is_spectral or not isinstance(order, (int, float)):
        return _of_matrix(func, args, kwargs)
    if order <= 0:
        raise ValueError(f"the norm of order {order} of a shard ({shard.sharding}) cannot be put together from parts")
    sharding, order = shard.sharding, float(order)
    dtype = kwargs.get("dtype") or shard.dtype
    parts = [torch.linalg.vector_norm(part, order, dtype=dtype) for part in sharding.counted(local_tensor(shard))]
    norm = torch.linalg.vector_norm(torch.stack(parts), order) if parts else torch.zeros((), dtype=dtype).to(shard)
    if sharding.mesh.is_over_replicas(sharding.layout):  # sums over the model lack the other replicas
        norm = norm_of_parts(sharding.axis, norm, order) * (sharding.mesh.tp.rank == 0)
    return partial_norm(norm, sharding.mesh, order, isinstance(shard, GradientShard) or not sharding.counts)


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, order = args[0], (args[1] if len(args) > 1 else kwargs.get("ord", 2))
    return tuple(torch.linalg.vector_norm(tensor, order, dtype=kwargs.get("dtype")) for tensor in tensors)


# Matrices -------------------------------------------------------------------------------------------------------------


def _derived(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions of each element by itself, such as those that create and update the states of optimizers."""
    with without_override():
        result = func(*args, **kwargs)
        shard = args[0] if isinstance(args[0], Shard) else next((arg for arg in args if isinstance(arg, Shard)), None)
        if shard is None or type(result) is not Tensor or result.shape != shard.shape:
            return result
        return mark(result, shard.sharding, Shard)


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """The same values in another type or place, or without gradients; those of a weight stay a weight."""
    result = _derived(func, args, kwargs)
    if _is_weight(args[0]) and type(result) is Shard:
        result.is_weight = True
    return result


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    """As a cast. A ``ZeroRedundancyOptimizer`` under construction asks each parameter for its type.

    Raises:
        ValueError: it would overwrite experts over replicas with others.
    """
    frame: Any = sys._getframe()
    if len(args) == 1 and not kwargs and args[0].sharding.axis is not args[0].sharding.mesh.tp:
        while frame is not None and type(frame.f_locals.get("self")).__name__ != "ZeroRedundancyOptimizer":
            frame = frame.f_back
        if frame is not None:
            raise ValueError(
                f"ZeroRedundancyOptimizer would overwrite the experts of one replica with others: "
                f"{args[0].sharding.name} is sharded over {args[0].sharding.axis.size} ranks of several replicas. Give "
                "model.expert_parameters() an optimizer of their own, and this one the other parameters"
            )
    return _cast(func, args, kwargs)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Transposed or indexed."""
    with without_override():
        result = func(*args, **kwargs)
    return mark(result, args[0].sharding, WeightView) if _is_weight(args[0]) and type(result) is Tensor else result


def _is_weight(value: Any) -> bool:
    """Whether products with a tensor are those of a sharded layer, outside of it."""
    return isinstance(value, (ShardedParameter, WeightView)) or (isinstance(value, Shard) and value.is_weight)


def _product(func: Any, args: Any, kwargs: Any) -> Any:
    weight = next((arg for arg in tree_leaves((args, kwargs)) if _is_weight(arg)), None)
    if weight is not None and not _is_called_by_operation():
        raise RuntimeError(
            f"{_name(func)} with a shard ({weight.sharding}) outside of its layer would give a part of the result: "
            "call the layer itself, or pass weight.full_tensor(), a collective of the tensor-parallel group"
        )
    return _of_matrix(func, args, kwargs)


def _lookup(func: Any, args: Any, kwargs: Any) -> Any:
    """``embedding(ids, weight)``: tables with sharded features, such as biases of heads, are looked up as they are."""
    weight = next((arg for arg in (*args, *kwargs.values()) if _is_weight(arg)), None)
    if weight is not None and weight.sharding.layout.dim == 0:
        return _product(func, args, kwargs)
    with without_override():
        return func(*args, **kwargs)


def _is_called_by_operation() -> bool:
    """Whether the call is a step of an operation that a layer has called with its part.

    A graph of torch.compile's debugging backend "eager" is one. Another is the backward pass of grouped products of
    experts, which is Python code in transformers 5.17.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<eval_with_key>") or code.co_name == "_grouped_mm_fallback_backward":
            return True
        frame = frame.f_back
    return False


def _of_matrix(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that mix the elements of a matrix; those of a replicated one are all here."""
    shard = next((arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Shard)), None)
    if shard is not None and shard.sharding.layout.dim is not None and shard.sharding.axis.size > 1:
        warnings.warn(
            f"{_name(func)} of a shard ({shard.sharding}) treats it as a matrix of its own. An optimizer that does so "
            "(Muon, Shampoo, SOAP, GaLore, Adafactor) makes other updates than on one process: construct it by "
            "model.matrix_optimizer(cls, parameters, **options), which gives it full matrices",
            ShardWarning,
            stacklevel=4,
        )
    with without_override():
        return func(*args, **kwargs)


def _chunk(func: Any, args: Any, kwargs: Any) -> Any:
    """``fully_shard`` cuts parameters by this function, also when it wraps a block of the model only.

    Raises:
        ValueError: it would cut a shard over ranks that hold other shards.
    """
    if isinstance(args[0], ShardedParameter):
        require_replicas_in_fully_shard(args[0].sharding.name, args[0].sharding.mesh)
    with without_override():
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


def _size(func: Any, args: Any, kwargs: Any) -> Any:
    """Of a value of ``state_dict()`` or of an optimizer's state the full size, which torch compares with the saved one.

    Its ``shape``, and the size of a single dimension, are those of the local tensor.
    """
    if len(args) == 1 and not kwargs and type(args[0]) is Shard:
        return torch.Size(args[0].sharding.layout.shape)
    with without_override():
        return func(*args, **kwargs)


def _new_empty(func: Any, args: Any, kwargs: Any) -> Any:
    """What ``torch.distributed.checkpoint`` copies a value to before it saves it asynchronously; see `Shard.set_`."""
    with without_override():
        result = func(*args, **kwargs)
    return mark(result, args[0].sharding, Shard) if type(args[0]) is Shard and not result.dim() else result


_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
_FACTORIES = (torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like)
_CASTS = ("clone", "detach", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "type")
_ARITHMETIC = ("add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "abs", "sign", "lerp", "square", "addcdiv")
_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow")
_PRODUCTS = (
    *(F.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch.tensordot, torch.einsum),
    *(Tensor.matmul, Tensor.mm, Tensor.addmm, Tensor.__matmul__, Tensor.__rmatmul__),
)
_VIEWS = (
    *(torch.t, torch.transpose, torch.permute, torch.unsqueeze, torch.index_select, Tensor.t, Tensor.transpose),
    *(Tensor.permute, Tensor.unsqueeze, Tensor.index_select, Tensor.__getitem__),
    *(getattr(Tensor, name).__get__ for name in ("T", "mT")),
)
_MATRIX_FUNCTIONS = (
    *(torch.svd, torch.qr, Tensor.svd, Tensor.qr),  # type: ignore[attr-defined]
    *(torch.linalg.svd, torch.linalg.qr, torch.linalg.eigh, torch.linalg.inv, torch.linalg.matrix_norm),
    *(torch.mean, Tensor.mean, torch.sum, Tensor.sum, torch.var, Tensor.var, torch.std, Tensor.std),
    *(torch.amax, Tensor.amax, torch.max, Tensor.max),
)

_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_MATRIX_FUNCTIONS, _of_matrix),
    **dict.fromkeys(_PRODUCTS, _product),
    F.embedding: _lookup,
    **dict.fromkeys(_FACTORIES, _derived),
    **{getattr(Tensor, name): _derived for name in _ARITHMETIC},
    **{getattr(torch, name): _derived for name in _ARITHMETIC},
    **{getattr(Tensor, name): _cast for name in _CASTS},
    **dict.fromkeys((torch.clone, torch.detach), _cast),
    Tensor.type: _type,
    **dict.fromkeys(_VIEWS, _view),
    **{getattr(Tensor, f"__{name}__"): _derived for name in _OPERATORS},
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
    torch.chunk: _chunk,
    Tensor.size: _size,
    Tensor.new_empty: _new_empty,
}

_HANDLERS_OF_VIEWS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    F.embedding: _lookup,
    **dict.fromkeys((*_VIEWS, *(getattr(Tensor, name) for name in _CASTS)), _view),
}
