"""Parameters that know their sharding, so that external tools give correct results or raise an error.

Optimizers, checkpoint libraries and gradient clipping see a local shard as an ordinary parameter. Elementwise tools are
correct anyway. For all others, `ShardedParameter` and the tensors derived from it (gradients, optimizer states, values
of ``state_dict()``) implement torch's protocols:

* gradient norms are norms of the full model (``torch.nn.utils.clip_grad_norm_`` and all its callers);
* ``torch.distributed.checkpoint`` saves and loads shards as chunks of full tensors, at any parallel sizes;
* elementwise functions run on the local tensor and return a shard (`shard_functions`);
* norms, sums, means and a few other reductions cover the full tensor, with gradients of every order;
* random numbers are drawn for the full tensor, and each rank keeps its shard.

Every other function raises outside of the layer, since it would treat the local shard as the full tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from oslo_models.distributed import checkpoint_chunks
from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.callers import (
    calling_optimizer,
    computes_in_deepspeed,
    computes_in_layer,
    computes_in_owner,
    computes_initial_bounds,
    is_called_by_operation,
    is_read_by_ddp,
    require_replicas_in_ddp,
    require_replicas_in_fully_shard,
    require_replicas_in_zero,
)
from oslo_models.distributed.collectives import all_gather, all_reduce
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.partial_norm import PartialNorm, norm_of_parts, partial_norm
from oslo_models.distributed.shard_functions import ABOUT_MEMORY, ELEMENTWISE, LISTS_ELEMENTWISE, RESHAPED
from oslo_models.sharding.layout import Layout, Range

without_override = torch._C.DisableTorchFunctionSubclass
"""Context in which shards act as plain tensors at no cost. Layers compute with their own shards in it."""


def layer_context(weight: Tensor) -> Any:
    """Return the context in which a layer computes with its weight.

    This is `without_override` for shards, plain tensors and classes that compute below the override, in
    `__torch_dispatch__`. Weight classes of other libraries, such as torchao's quantised weights, compute in their
    override and need it.
    """
    is_plain = isinstance(weight, (_Parameter, Shard)) or type(weight) in _PLAIN or _has_no_override(weight)
    return without_override() if is_plain else nullcontext()


def _has_no_override(weight: Tensor) -> bool:
    return type(weight).__torch_function__ is torch._C._disabled_torch_function_impl


_PLAIN = (Tensor, nn.Parameter)
_GRAD: Any = Tensor.grad


@dataclass(frozen=True)
class Sharding:
    """Sharding of a tensor: its full tensor, layout and mesh.

    Attributes:
        name: the name of the parameter in the full model.
        layout: its layout over the tp axis.
        mesh: the axes of the model.
        counts: whether norms count the copy on this pipeline stage. Tied weights have copies on several stages.
    """

    name: str
    layout: Layout
    mesh: ParallelMesh
    counts: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self  # a copied model is on the same ranks

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
        return self.mesh.experts if self.is_over_replicas else self.mesh.tp

    @property
    def is_over_replicas(self) -> bool:
        """Whether the ranks of `axis` belong to several data-parallel replicas, as they may for experts."""
        return self.mesh.is_over_replicas(self.layout)

    @property
    def replicas(self) -> Axis:
        """The ranks with the same shard."""
        return self.mesh.expert_replicas if self.is_over_replicas else self.mesh.dp

    @property
    def is_part(self) -> bool:
        """Whether this rank holds less than the full tensor."""
        return self.layout.dim is not None and self.axis.size > 1

    def counted(self, local: Tensor) -> list[Tensor]:
        """Return the slices that this rank contributes to a norm. Each element of the full tensor counts once."""
        owned = self.layout.owned_indices(self.axis.rank) if self.counts else []
        return [local[here] for _, here in owned]


def _said(ranges: Sequence[Range]) -> str:
    return " and ".join(f"{start}:{stop}" for start, stop in ranges)


class Shard(Tensor):
    """Local shard of a full tensor, or the local copy of a replicated tensor.

    Attributes:
        sharding: the full tensor and its layout.
        is_weight: whether the values are parameter values, as opposed to gradients or optimizer states.
        has_plain_storage: whether kernels may read its memory like a plain tensor.
    """

    sharding: Sharding
    is_weight = False
    has_plain_storage: ClassVar[bool] = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # While torch.compile traces a model, all shards are in their layers. Modes are disabled too: with an active
        # mode (torch.set_default_device), dynamo enters here repeatedly for an attribute such as weight.dtype.
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        if PartialNorm in types:  # it resolves itself first
            return NotImplemented
        if func in ABOUT_MEMORY and func not in _HANDLERS:
            with without_override():
                return func(*args, **(kwargs or {}))
        return _HANDLERS.get(func, _of_matrix)(func, *_with_first(args, kwargs or {}))

    def full_tensor(self) -> Tensor:
        """Gather the full tensor, with gradients, on every tensor-parallel rank. A collective of the group."""
        return _Gathered.apply(_with_graph(self), self.sharding)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Handle ``copy.set_(storage, offset, x.size(), x.stride())``; ``x.size()`` may be the full size, see `_size`.

        This is a method because torch does not pass this function to ``__torch_function__``.
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
        """Pickle as a plain tensor: the reading program may run on other ranks or without any."""
        local = local_tensor(self)
        if isinstance(self, nn.Parameter):
            return torch._utils._rebuild_parameter, (local, self.requires_grad, OrderedDict())
        return local.__reduce_ex__(protocol)

    # torch.distributed.checkpoint's protocol for shards

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return checkpoint_chunks.write_items(fqn, local_tensor(self), *self._layout_and_rank())

    def __create_chunk_list__(self) -> list[Any]:
        return checkpoint_chunks.chunks(*self._layout_and_rank())

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return checkpoint_chunks.values_of(index, local_tensor(self), *self._layout_and_rank())

    def _layout_and_rank(self) -> tuple[Layout, int]:
        return self.sharding.layout, self.sharding.axis.rank


class WeightView(Tensor):
    """Elements of a shard in another shape, outside of its layer. Functions that mix or overwrite them raise.

    Attributes:
        sharding: the sharding of the whole tensor.
    """

    sharding: Sharding

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if PartialNorm in types:
            return NotImplemented
        if func in ABOUT_MEMORY or torch.compiler.is_compiling():
            with without_override():
                return func(*args, **(kwargs or {}))
        return _HANDLERS_OF_VIEWS.get(func, _of_matrix)(func, *_with_first(args, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_override():
            return f"WeightView(of {self.sharding}):\n{self.detach().as_subclass(Tensor)!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_override():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class GradientShard(Shard):
    """The gradient of a `Shard`."""


class _Parameter(nn.Parameter):
    """Parameter that returns its gradient as a `GradientShard`."""

    sharding: Sharding
    has_plain_storage: ClassVar[bool] = True

    @property
    def grad(self) -> Tensor | None:
        """The gradient, as a `GradientShard`."""
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

    def detach(self) -> Tensor:
        """Detach like any parameter.

        Raises:
            ValueError: the caller is ``DistributedDataParallel`` over ranks with different shards.
        """
        if not torch.compiler.is_compiling():
            require_replicas_in_ddp(self.sharding)
        return super().detach()

    def type(self, *args: Any, **kwargs: Any) -> Any:
        """Return or change the type like any parameter.

        Raises:
            ValueError: the caller is ``ZeroRedundancyOptimizer`` over ranks with different shards.
        """
        if not torch.compiler.is_compiling():
            require_replicas_in_zero(self.sharding)
        return super().type(*args, **kwargs)


class ShardedParameter(Shard, _Parameter):
    """Local shard of a parameter that is sharded over the tensor-parallel group."""


class ReplicatedParameter(_Parameter):
    """Parameter with a copy on every rank of the tensor-parallel group. Only its gradient class is special."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with without_override():
            copied = memo.setdefault(id(self), super().__deepcopy__(memo))
        return mark(copied, self.sharding, type(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._utils._rebuild_parameter, (self.data, self.requires_grad, OrderedDict())


def mark(tensor: Any, sharding: Sharding, cls: type) -> Any:
    """Make ``tensor`` an instance of ``cls`` in place, since optimizers and modules refer to the object."""
    tensor.__class__ = cls
    tensor.sharding = sharding
    return tensor


def mark_parameter(param: nn.Parameter, sharding: Sharding) -> None:
    """Attach the sharding to a parameter in place. Parameter classes of other libraries stay unchanged."""
    if type(param) is not nn.Parameter and not isinstance(param, _Parameter):
        return
    is_full = sharding.layout.dim is None or sharding.axis.size == 1
    mark(param, sharding, ReplicatedParameter if is_full else ShardedParameter)


def replace_parameter(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
    """Attach the sharding of a module's parameter to the parameter that is about to replace it.

    Raises:
        RuntimeError: the new parameter is a full tensor.
    """
    held: Any = module._parameters.get(name)
    if type(value) not in (nn.Parameter, Shard) or not isinstance(held, ShardedParameter) or not held.sharding.is_part:
        return
    assert value is not None
    full, local = held.sharding.layout.shape, held.sharding.layout.local_shape(held.sharding.axis.rank)
    if tuple(value.shape) == tuple(local):
        mark(value, held.sharding, ShardedParameter)
    elif tuple(value.shape) == tuple(full):
        raise RuntimeError(
            f"{name} of a {type(module).__name__} is a shard ({held.sharding}), and a full tensor was assigned to it: "
            "call copy_(full), which takes the part of a rank, under torch.no_grad()"
        )


def mark_buffer(module: nn.Module, leaf: str, sharding: Sharding) -> None:
    """Make ``state_dict`` return a sharded buffer as a `Shard`. The module itself keeps a plain tensor."""
    module.register_state_dict_post_hook(partial(_mark_value, leaf, sharding))


def _mark_value(leaf: str, sharding: Sharding, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    if (value := state.get(prefix + leaf)) is not None:
        state[prefix + leaf] = mark(value.detach(), sharding, Shard)


def unmark_parameter(param: Any) -> None:
    """Revert `mark_parameter` in place."""
    if isinstance(param, _Parameter):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    for name in ("sharding", "ds_pipe_replicated", "model_parallel"):
        vars(param).pop(name, None)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard as a plain tensor with shared memory and without gradients."""
    with without_override():
        return tensor.detach().as_subclass(Tensor) if isinstance(tensor, Shard) else tensor


@torch.no_grad()
def gather_shards(axis: Axis, shard: Tensor, layout: Layout) -> Tensor:
    """Gather the full tensor, bit for bit, on every rank of the axis. A collective of the axis."""
    shard = local_tensor(shard)
    if layout.dim is None:
        return shard.clone()
    full = shard.new_zeros(layout.shape)
    for there, here in layout.owned_indices(axis.rank):
        full[there] = shard[here]
    # Sum bytes instead of numbers, since -0.0 + 0.0 is 0.0.
    all_reduce(axis, full.view(torch.uint8) if full.dim() else full)
    return full


def _with_graph(tensor: Tensor) -> Tensor:
    """Return the local shard as a plain tensor in the same autograd graph."""
    with without_override():
        return tensor.as_subclass(Tensor)


# In both pairs, each function is the backward pass of the other. Copies of an element on several ranks count as one
# variable: each copy receives the full gradient, as in the layers.


class _Gathered(torch.autograd.Function):
    """Gather the full tensor from shards. Its gradient is equal on all ranks; each rank takes its shard of it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return gather_shards(sharding.axis, local.detach(), sharding.layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (_Part.apply(grad, ctx.sharding) if ctx.sharding.is_part else grad), None


class _Part(torch.autograd.Function):
    """Take the local shard of a full tensor that is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.layout.shard(full.detach(), sharding.axis.rank).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Gathered.apply(grad, ctx.sharding), None


class _Total(torch.autograd.Function):
    """Sum all elements of the full tensor, on every rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: Sharding) -> Tensor:
        ctx.shape, ctx.sharding = local.shape, sharding
        parts = [local[here].sum() for _, here in sharding.layout.owned_indices(sharding.axis.rank)]
        return all_reduce(sharding.axis, torch.stack(parts).sum() if parts else local.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Spread.apply(grad, ctx.shape, ctx.sharding), None


class _Spread(torch.autograd.Function):
    """Expand a number that is equal on all ranks to the shape of a shard."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, shape: torch.Size, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return number.detach().expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Total.apply(grad, ctx.sharding), None, None


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the first argument positional, since handlers expect it there: ``torch.clone(input=x)``."""
    name = None if args else next((name for name in _FIRST_ARGUMENTS if name in kwargs), None)
    if name is None:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


_FIRST_ARGUMENTS = ("tensor", "input", "self", "x", "A", "equation", "a")  # nn.init.uniform_(tensor, a, b)
"""Names of the first argument in torch's signatures of the handled functions."""


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
    is_copy = not shard.sharding.is_part and not isinstance(shard, GradientShard) and shard.sharding.counts
    if is_copy or computes_in_deepspeed():
        return _local(func, args, kwargs)
    if torch.is_grad_enabled() and shard.requires_grad:
        return _norm_with_graph(shard, float(order), kwargs)
    if order <= 0:
        raise ValueError(f"the norm of order {order} of a shard ({shard.sharding}) cannot be computed from parts")
    sharding, order = shard.sharding, float(order)
    dtype = kwargs.get("dtype") or shard.dtype
    parts = [torch.linalg.vector_norm(part, order, dtype=dtype) for part in sharding.counted(local_tensor(shard))]
    norm = torch.linalg.vector_norm(torch.stack(parts), order) if parts else torch.zeros((), dtype=dtype).to(shard)
    if sharding.mesh.is_over_replicas(sharding.layout):  # sums over the model miss the other replicas
        norm = norm_of_parts(sharding.axis, norm, order) * (sharding.mesh.tp.rank == 0)
    return partial_norm(norm, sharding.mesh, order, isinstance(shard, GradientShard) or not sharding.counts)


def _norm_with_graph(shard: Shard, order: float, kwargs: dict[str, Any]) -> Tensor:
    """Return the norm of a weight as a differentiable loss term."""
    if not shard.sharding.counts:
        raise RuntimeError(
            f"the norm of {shard.sharding.name} is the norm of a tied weight that counts on another stage: leave it "
            "out of the loss of this stage"
        )
    dtype = kwargs.get("dtype")
    values = _with_graph(shard) if dtype is None else _with_graph(shard).to(dtype)
    if not 1 <= order < float("inf"):
        return torch.linalg.vector_norm(_Gathered.apply(values, shard.sharding), order)
    total = _Total.apply(values.square() if order == 2 else values.abs().pow(order), shard.sharding)
    is_zero = total == 0  # the gradient of torch's norm is zero there
    return torch.where(is_zero, total, torch.where(is_zero, 1.0, total).pow(1.0 / order))


def _foreach_norm(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, order = args[0], (args[1] if len(args) > 1 else kwargs.get("ord", 2))
    return tuple(torch.linalg.vector_norm(tensor, order, dtype=kwargs.get("dtype")) for tensor in tensors)


# Reductions of all elements -------------------------------------------------------------------------------------------


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``sum(x, dtype=...)`` and ``mean(x, dtype=...)``."""
    if not _reduces_shard(args, kwargs, "dtype"):
        return _of_matrix(func, args, kwargs)
    values, sharding = _with_graph(args[0]), args[0].sharding
    is_mean = _name(func) == "mean"
    if is_mean and not (values.is_floating_point() or kwargs.get("dtype")):
        return _of_matrix(func, args, kwargs)
    exact = values.dtype if values.is_floating_point() else torch.int64
    total: Tensor = _Total.apply(values.to(kwargs.get("dtype") or exact), sharding)
    return total / torch.Size(sharding.layout.shape).numel() if is_mean else total


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``max``, ``min``, ``amax``, ``amin``, ``all`` and ``any`` of all elements."""
    if not _reduces_shard(args, kwargs):
        return _of_matrix(func, args, kwargs)
    if torch.is_grad_enabled() and args[0].requires_grad:
        return func(args[0].full_tensor())
    local, sharding = local_tensor(args[0]), args[0].sharding
    parts = [_owned(local, sharding.layout, rank) for rank in range(sharding.axis.size)]
    mine = parts[sharding.axis.rank]
    found = func(mine)[None] if mine.numel() else mine
    is_bool = func in _TRUTHS
    counts = [min(part.numel(), 1) for part in parts]
    return func(all_gather(sharding.axis, found.byte() if is_bool else found, 0, counts)).to(found.dtype)


def _owned(local: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the elements that count on a rank as a flat tensor. For other ranks, only its size is meaningful."""
    source = local if local.shape == layout.local_shape(rank) else local.new_empty(layout.local_shape(rank))
    return torch.cat([local.new_empty(0), *(source[here].flatten() for _, here in layout.owned_indices(rank))])


def _comparison(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``equal(x, y)`` and ``allclose(x, y, ...)``, equal on all ranks. ``y`` may be a shard or a full tensor."""
    shards = [arg for arg in args[:2] if isinstance(arg, Shard)]
    if not shards or len(args) < 2 or any(isinstance(arg, WeightView) for arg in args):
        return _of_matrix(func, args, kwargs)
    sharding = shards[0].sharding
    if sharding.is_part and args[0].shape != args[1].shape:
        args = (*(arg.full_tensor() if isinstance(arg, Shard) else arg for arg in args[:2]), *args[2:])
        return func(*args, **kwargs)
    is_same = _local(func, args, kwargs)
    if not sharding.is_part:
        return is_same
    flags = torch.tensor([is_same], dtype=torch.uint8, device=shards[0].device)
    return bool(all_gather(sharding.axis, flags, 0, [1] * sharding.axis.size).all())


def _reduces_shard(args: Any, kwargs: Any, *options: str) -> bool:
    """Return whether a call reduces all elements of a shard, outside of its layer."""
    is_whole = len(args) == 1 and isinstance(args[0], Shard) and kwargs.keys() <= set(options)
    return is_whole and args[0].sharding.is_part and not computes_in_layer(args[0].sharding)


# Random numbers -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle random initialization: each rank draws the full tensor and keeps its shard."""
    sharding = args[0].sharding if isinstance(args[0], Shard) else None
    if sharding is None or len([arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)]) > 1:
        return _of_matrix(func, args, kwargs)
    local = local_tensor(args[0])
    full = func(local.new_empty(sharding.layout.shape), *args[1:], **kwargs)
    part = sharding.layout.shard(full, sharding.axis.rank)
    if not _writes(func):
        return mark(part.clone(), sharding, Shard)
    local.copy_(part)
    return args[0]


# Matrices -------------------------------------------------------------------------------------------------------------


def _local(func: Any, args: Any, kwargs: Any) -> Any:
    with without_override():
        return func(*args, **kwargs)


def _derived(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle elementwise functions, such as the creation and update of optimizer states."""
    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (Shard, WeightView))]
    if torch.is_grad_enabled() and given and given[0].sharding.is_part:
        start = int(_writes(func))
        args = (*args[:start], *(_copied(arg, given[0]) for arg in args[start:]))
    result = _local(func, args, kwargs)
    if not given or type(result) is not Tensor or any(result is arg for arg in args):
        _require_one_layout(func, given)
        return result
    shard = given[0]
    if isinstance(shard, Shard) and result.shape == shard.shape:
        _require_one_layout(func, given)
        return mark(result, shard.sharding, Shard)
    return result if _is_all_or_in_layer(shard) else mark(result, shard.sharding, WeightView)


def _copied(operand: Any, shard: Shard | WeightView) -> Any:
    """Make the gradient of a replicated operand a sum over ranks, since each rank computes a part of it."""
    if not isinstance(operand, Tensor) or isinstance(operand, (Shard, WeightView)) or not operand.requires_grad:
        return operand
    from_last = shard.dim() - (shard.sharding.layout.dim or 0)
    is_spread = operand.numel() == 1 or (
        isinstance(shard, Shard) and (operand.dim() < from_last or operand.shape[-from_last] == 1)
    )
    if not is_spread or computes_in_layer(shard.sharding):
        return operand
    if shard.sharding.layout.overlaps:  # the sum would count copies of an element repeatedly
        raise RuntimeError(
            f"a tensor with gradients meets a shard ({shard.sharding}) with copies on several ranks: pass its "
            "full_tensor()"
        )
    return copy_to(shard.sharding.axis, operand)


def _derived_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``torch._foreach_*`` and fused optimizer steps."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    for given in zip(*lists, strict=False):
        shards = [arg for arg in given if isinstance(arg, (Shard, WeightView))]
        if any(isinstance(arg, WeightView) for arg in shards):
            return _of_matrix(func, args, kwargs)
        _require_one_layout(func, shards)
    results = _local(func, args, kwargs)
    for result, *of_result in zip(results or (), *lists, strict=False):
        shard = next((arg for arg in of_result if isinstance(arg, Shard)), None)
        if shard is not None and type(result) is Tensor and not any(result is arg for arg in of_result):
            mark(result, shard.sharding, Shard)
    return results


def _require_one_layout(func: Any, given: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` if two shards hold elements at different positions of their full tensors."""
    for other in given[1:]:
        one, two = given[0].sharding, other.sharding
        if one is two or one.layout == two.layout or not (one.is_part or two.is_part) or computes_in_layer(one):
            continue
        raise RuntimeError(
            f"{_name(func)} would combine elements of different places: {one} and {two}. Pass the result of "
            "full_tensor()"
        )


def _of_view(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle elementwise functions of a view. Writes raise: they could affect other elements than on one process."""
    written = args[0] if args and _writes(func) else kwargs.get("out")
    if isinstance(written, WeightView):
        return _of_matrix(func, args, kwargs)
    return _derived(func, args, kwargs)


def _gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``torch.autograd.grad(outputs, inputs)``. Gradients of shards are shards."""
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    grads = _local(func, args, kwargs)
    for given, grad in zip(inputs, grads, strict=True):
        if isinstance(given, Shard) and type(grad) is Tensor:
            mark(grad, given.sharding, GradientShard)
    return grads


def _where(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``where(condition, x, y)``. With only a condition, it returns positions."""
    return (_of_matrix if len(args) + len(kwargs) == 1 else _derived)(func, args, kwargs)


def _is_all_or_in_layer(tensor: Any) -> bool:
    return not tensor.sharding.is_part or computes_in_layer(tensor.sharding)


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.copy_(values)`` with values of the local shard or of the full tensor."""
    target, values = args[0], args[1] if len(args) > 1 else kwargs.get("src")
    is_plain = isinstance(target, Shard) and target.sharding.is_part and type(values) in _PLAIN
    if is_plain and values.shape == target.sharding.layout.shape:
        part = target.sharding.layout.shard(values, target.sharding.axis.rank)
        args, kwargs = (target, part, *args[2:]), {key: value for key, value in kwargs.items() if key != "src"}
    return (_of_view if isinstance(target, WeightView) else _derived)(func, args, kwargs)


def _set_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.data = values`` with values of the local shard or of the full tensor."""
    target, values = args
    if isinstance(target, Shard) and target.sharding.is_part and type(values) in _PLAIN:
        layout, rank = target.sharding.layout, target.sharding.axis.rank
        if values.shape == layout.shape and values.shape != layout.local_shape(rank):
            values = layout.shard(values, rank).clone()
    return _local(func, (target, values), kwargs)


def _with_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.register_hook(hook)``. The hook receives a shard."""
    param, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    if not isinstance(param, ShardedParameter) or computes_in_layer(param.sharding):
        return _local(func, args, kwargs)

    def with_shard(grad: Tensor) -> Tensor | None:
        result = hook(mark(grad.view_as(grad), param.sharding, GradientShard))
        return _with_graph(result) if isinstance(result, Shard) else result

    return _local(func, (param, with_shard), {})


def _assigned(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x[index] = value`` for all elements or a mask of the full shape."""
    target, index = args[:2]
    is_whole = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == target.shape
    if isinstance(target, WeightView) or not (is_whole or is_mask):
        return _of_matrix(func, args, kwargs)
    return _local(func, args, kwargs)


def _cast(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle casts, moves, copies and detaching. The result of a weight is a weight."""
    result = _derived(func, args, kwargs)
    if _is_weight(args[0]) and type(result) is Shard:
        result.is_weight = True
    return result


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle views and selections of elements."""
    result, source = _local(func, args, kwargs), args[0]
    if not isinstance(source, (Shard, WeightView)):
        return _of_matrix(func, args, kwargs)
    if not _is_weight(source) and _is_all_or_in_layer(source):
        return result
    return tree_map_only(Tensor, partial(_as_view, source.sharding), result)


def _as_view(sharding: Sharding, result: Tensor) -> Tensor:
    return cast(Tensor, mark(result, sharding, WeightView)) if type(result) is Tensor else result


def _is_weight(value: Any) -> bool:
    """Return whether a tensor has weight values, so that products with it belong in its sharded layer."""
    return isinstance(value, (ShardedParameter, WeightView)) or (isinstance(value, Shard) and value.is_weight)


def _product(func: Any, args: Any, kwargs: Any) -> Any:
    weight = next((arg for arg in tree_leaves((args, kwargs)) if _is_weight(arg)), None)
    if weight is not None and not _computes_with_part(weight):
        raise RuntimeError(
            f"{_name(func)} with a shard ({weight.sharding}) outside of its layer would give a part of the result: "
            + _advice("call the layer itself, or pass weight.full_tensor(), a collective of the tensor-parallel group")
        )
    return _of_matrix(func, args, kwargs)


def _lookup(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``embedding(ids, weight)``. Tables with sharded features, such as biases per head, allow local lookup."""
    weight = next((arg for arg in (*args, *kwargs.values()) if _is_weight(arg)), None)
    if weight is not None and weight.sharding.layout.dim == 0:
        return _product(func, args, kwargs)
    with without_override():
        return func(*args, **kwargs)


def _computes_with_part(weight: Any) -> bool:
    """Return whether a product with a shard is a step of its layer. Attention layers also split weights by heads."""
    if is_called_by_operation() or computes_in_owner(weight.sharding):
        return True
    return isinstance(weight, WeightView) and computes_in_layer(weight.sharding)


def _of_matrix(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle functions that mix elements and unknown functions. They run only in the layer or on full tensors."""
    given = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, (Shard, WeightView))]
    part = next((arg for arg in given if arg.sharding.is_part), None)
    if part is None or computes_in_layer(part.sharding):
        return _local(func, args, kwargs)
    advice = _advice(_BY_COPY if _writes(func) else _BY_FULL_TENSOR)
    found = f"{_name(func)} of a shard ({part.sharding})"
    raise RuntimeError(f"{found} would take it for the full tensor: {advice}")


_BY_FULL_TENSOR = "pass full_tensor(), a collective of the tensor-parallel group that has gradients"
_BY_COPY = (
    "change full = weight.full_tensor(), a collective, and call weight.copy_(full), which takes the part of a rank"
)


def _writes(func: Any) -> bool:
    """Return whether a function writes to its first argument."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return bool(name.endswith("_"))


def _advice(otherwise: str) -> str:
    """Return the remedy: advice for an optimizer if its step is on the call stack, else ``otherwise``."""
    optimizer = calling_optimizer()
    if optimizer is None:
        return otherwise
    return (
        f"{optimizer} needs full tensors and would make other updates than on one process. An optimizer of matrices "
        "(Muon, Shampoo, SOAP, GaLore, Adafactor) gets them by model.matrix_optimizer(cls, parameters, **options)"
    )


def _chunk(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``chunk``. ``fully_shard`` splits parameters with it, even if it wraps only a block of the model.

    Raises:
        ValueError: ``fully_shard`` would split a shard over ranks with different shards.
    """
    if isinstance(args[0], ShardedParameter):
        require_replicas_in_fully_shard(args[0].sharding.name, args[0].sharding.mesh)
    return _view(func, args, kwargs)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


def _size(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the full size for values of ``state_dict()`` and optimizer states: torch compares it with the saved size.

    ``shape`` and the size of a single dimension refer to the local tensor. The exception is ``torch.nn.init``, which
    computes the bounds of random numbers from the full sizes.
    """
    full = args[0].sharding.layout.shape if isinstance(args[0], Shard) else None
    if full is not None and len(args) == 2 and computes_initial_bounds():
        return full[args[1]]
    if full is not None and len(args) == 1 and not kwargs and type(args[0]) is Shard:
        return torch.Size(full)
    with without_override():
        return func(*args, **kwargs)


def _device(func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``x.device``. ``DistributedDataParallel`` reads it before it compares shapes and sends parameters."""
    if is_read_by_ddp():
        require_replicas_in_ddp(args[0].sharding)
    return _local(func, args, kwargs)


def _new_empty(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``new_empty``: asynchronous saves of ``torch.distributed.checkpoint`` copy into it; see `Shard.set_`."""
    with without_override():
        result = func(*args, **kwargs)
    return mark(result, args[0].sharding, Shard) if type(args[0]) is Shard and not result.dim() else result


_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
_DRAWS = (
    *(torch.rand_like, torch.randn_like, torch.randint_like, Tensor.uniform_, Tensor.normal_, Tensor.random_),
    *(Tensor.exponential_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, Tensor.bernoulli_),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
)
_SUMS = (torch.sum, Tensor.sum, torch.mean, Tensor.mean)
_TRUTHS = (torch.all, Tensor.all, torch.any, Tensor.any)
_EXTREMES = (*_TRUTHS, torch.max, Tensor.max, torch.min, Tensor.min, torch.amax, Tensor.amax, torch.amin, Tensor.amin)
_COMPARISONS = (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
_CASTS = ("clone", "detach", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "type")
_PRODUCTS = (
    *(F.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch.tensordot, torch.einsum),
    *(Tensor.matmul, Tensor.mm, Tensor.addmm, Tensor.__matmul__, Tensor.__rmatmul__),
)

_HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(ELEMENTWISE, _derived),
    **dict.fromkeys(RESHAPED, _view),
    **dict.fromkeys(LISTS_ELEMENTWISE, _derived_lists),
    **dict.fromkeys(_PRODUCTS, _product),
    F.embedding: _lookup,
    **{getattr(Tensor, name): _cast for name in _CASTS},
    **dict.fromkeys((torch.clone, torch.detach), _cast),
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _foreach_norm,
    **dict.fromkeys(_SUMS, _sum),
    **dict.fromkeys(_EXTREMES, _extreme),
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(_DRAWS, _drawn),
    nn.init.constant_: _derived,
    torch.where: _where,
    torch.autograd.grad: _gradients,
    torch.autograd.backward: _local,
    Tensor.__setitem__: _assigned,
    Tensor.copy_: _copy,
    Tensor.register_hook: _with_hook,
    Tensor.device.__get__: _device,
    Tensor.data.__get__: _cast,  # type: ignore[attr-defined]
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.chunk: _chunk,
    Tensor.size: _size,
    Tensor.new_empty: _new_empty,
}

_HANDLERS_OF_VIEWS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(ELEMENTWISE, _of_view),
    Tensor.copy_: _copy,
    Tensor.__setitem__: _assigned,
    **dict.fromkeys(RESHAPED, _view),
    **dict.fromkeys(_PRODUCTS, _product),
    F.embedding: _lookup,
    **dict.fromkeys((*(getattr(Tensor, name) for name in _CASTS), torch.clone, torch.detach), _view),
}
