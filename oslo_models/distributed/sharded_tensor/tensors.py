"""Classes of shards, and the functions that mark parameters and buffers as shards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from oslo_models.distributed import checkpoint_chunks
from oslo_models.distributed.callers import (
    calling_optimizer,
    computes_in_deepspeed,
    computes_in_layer,
    require_replicas_in_ddp,
    require_replicas_in_zero,
)
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.partial_norm import PartialNorm
from oslo_models.distributed.shard_functions import ABOUT_MEMORY, JOINS, SPLITS
from oslo_models.distributed.sharded_tensor.autograd import Gathered, gather_local, without_override
from oslo_models.distributed.sharded_tensor.sharding import Sharding
from oslo_models.sharding.layout import Layout

Handler = Callable[[Any, Any, Any], Any]
HANDLERS: dict[Any, Handler] = {}
"""How shards handle a function of torch, called with the function, its arguments and its keyword arguments.

`handlers` fills this table and the next one. `mixing` handles all other functions.
"""
VIEW_HANDLERS: dict[Any, Handler] = {}
"""How views of weights handle a function of torch."""


def layer_context(weight: Tensor) -> Any:
    """Return the context in which a layer computes with its weight.

    This is `without_override` for shards, plain tensors and classes that compute below the override, in
    `__torch_dispatch__`. Weight classes of other libraries, such as torchao's quantised weights, compute in their
    override and need it.
    """
    is_plain = isinstance(weight, (MarkedParameter, Shard)) or type(weight) in PLAIN or _has_no_override(weight)
    return without_override() if is_plain else nullcontext()


def _has_no_override(weight: Tensor) -> bool:
    return type(weight).__torch_function__ is torch._C._disabled_torch_function_impl


PLAIN = (Tensor, nn.Parameter)
_GRAD: Any = Tensor.grad


class Shard(Tensor):
    """Local shard of a full tensor, or the local copy of a replicated tensor.

    Attributes:
        sharding: the full tensor and its layout.
        is_weight: whether the values are parameter values, as opposed to gradients or optimizer states.
        of_gradient: whether the values are a gradient or computed from one.
        has_plain_storage: whether kernels may read its memory like a plain tensor.
    """

    sharding: Sharding
    is_weight = False
    of_gradient = False
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
        if func in ABOUT_MEMORY and func not in HANDLERS:
            with without_override():
                return func(*args, **(kwargs or {}))
        return HANDLERS.get(func, mixing)(func, *_with_first(args, kwargs or {}))

    def full_tensor(self) -> Tensor:
        """Gather the full tensor, with gradients, on every tensor-parallel rank. A collective of the group."""
        return Gathered.apply(with_graph(self), self.sharding)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Handle ``copy.set_(storage, offset, x.size(), x.stride())``; ``x.size()`` may be the full size, see `size`.

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
        sharding: the sharding of the whole tensor, or of the first one if several are joined.
        of_gradient: whether the values are computed from gradients.
        is_joined: whether the values are elements of several gradients of one pipeline stage.
    """

    sharding: Sharding
    of_gradient = False
    is_joined = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if PartialNorm in types:
            return NotImplemented
        if func in ABOUT_MEMORY or torch.compiler.is_compiling():
            with without_override():
                return func(*args, **(kwargs or {}))
        return VIEW_HANDLERS.get(func, mixing)(func, *_with_first(args, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_override():
            return f"WeightView(of {self.sharding}):\n{self.detach().as_subclass(Tensor)!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        with without_override():
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


class GradientShard(Shard):
    """The gradient of a `Shard`."""

    of_gradient = True


class MarkedParameter(nn.Parameter):
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


class ShardedParameter(Shard, MarkedParameter):
    """Local shard of a parameter that is sharded over the tensor-parallel group."""


class ReplicatedParameter(MarkedParameter):
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
    if type(param) is not nn.Parameter and not isinstance(param, MarkedParameter):
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
    if isinstance(param, MarkedParameter):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
    for name in ("sharding", "ds_pipe_replicated", "model_parallel"):
        vars(param).pop(name, None)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the local shard as a plain tensor with shared memory and without gradients."""
    with without_override():
        return tensor.detach().as_subclass(Tensor) if isinstance(tensor, Shard) else tensor


def gather_shards(axis: Axis, shard: Tensor, layout: Layout) -> Tensor:
    """Gather the full tensor, bit for bit, on every rank of the axis. A collective of the axis."""
    return gather_local(axis, local_tensor(shard), layout)


def with_graph(tensor: Tensor) -> Tensor:
    """Return the local shard as a plain tensor in the same autograd graph."""
    with without_override():
        return tensor.as_subclass(Tensor)


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the first argument positional, since handlers expect it there: ``torch.clone(input=x)``."""
    name = None if args else next((name for name in _FIRST_ARGUMENTS if name in kwargs), None)
    if name is None:
        return args, kwargs
    return (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}


_FIRST_ARGUMENTS = ("tensor", "input", "self", "x", "A", "equation", "a")  # nn.init.uniform_(tensor, a, b)
"""Names of the first argument in torch's signatures of the handled functions."""


# Functions that mix elements ------------------------------------------------------------------------------------------


def on_local(func: Any, args: Any, kwargs: Any) -> Any:
    with without_override():
        return func(*args, **kwargs)


def mixing(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle functions that mix elements and unknown functions. They run only in the layer or on full tensors."""
    given = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, (Shard, WeightView))]
    part = next((arg for arg in given if arg.sharding.is_part), None)
    if part is None or computes_in_layer(part.sharding):
        result = on_local(func, args, kwargs)
        return _checked(func, result, given) if any(map(of_one_stage, given)) else result
    remedy = advice(_BY_COPY if writes(func) else _BY_FULL_TENSOR)
    found = f"{name_of(func)} of a shard ({part.sharding})"
    raise RuntimeError(f"{found} would take it for the full tensor: {remedy}")


def of_one_stage(value: Any) -> bool:
    """Return whether values are gradients of one of several pipeline stages, or computed from them."""
    return isinstance(value, (Shard, WeightView)) and value.of_gradient and value.sharding.mesh.pp.size > 1


def misses_stages(value: Any) -> bool:
    """Return whether the caller may sum such gradients over a model. Optimizers reduce each gradient alone."""
    if not of_one_stage(value) or computes_in_deepspeed() or computes_in_layer(value.sharding):
        return False
    return _is_joined(value) or calling_optimizer() is None


def require_all_stages(func: Any, given: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` if a function reduces gradients of one stage to a number, or selects among several."""
    found = next(filter(misses_stages, given), None)
    if found is not None:
        several = _is_joined(found)
        raise RuntimeError(
            f"{name_of(func)} of {'joined gradients' if several else 'a gradient'} ({found.sharding}"
            f"{' and others' if several else ''}) covers one pipeline stage, and the gradients of the other stages "
            "would be missing where such results are combined. Use model.clip_grad_norm_(...), which returns the norm "
            "of the full model on every stage, or reduce full_tensor() and combine the stages"
        )


def _is_joined(value: Any) -> bool:
    return isinstance(value, WeightView) and value.is_joined


def _checked(func: Any, result: Any, given: Sequence[Any]) -> Any:
    """Check and mark the result of a function that mixes elements of gradients of one stage."""
    several = any(map(_is_joined, given))
    name = getattr(func, "__name__", "")
    if name in SPLITS:
        return tree_map_only(Tensor, partial(mark_view, given=given), result)
    if name in JOINS:
        if type(result) is Tensor and not computes_in_deepspeed():
            names = {arg.sharding.name for arg in given}
            # batched optimizers compute with each gradient of a stack
            mark_view(result, given).is_joined = several or (len(names) > 1 and func is not torch.stack)
        return result
    is_number = isinstance(result, Tensor) and not result.dim() and any(arg.numel() > 1 for arg in given)
    if is_number or (several and not writes(func)):
        require_all_stages(func, given)
    return result


def mark_view(result: Any, given: Sequence[Any]) -> Any:
    """Mark a plain tensor as elements of shards or of their views."""
    if type(result) is Tensor:
        view: Any = mark(result, given[0].sharding, WeightView)
        view.of_gradient = any(arg.of_gradient for arg in given)
        view.is_joined = any(map(_is_joined, given))
    return result


_BY_FULL_TENSOR = "pass full_tensor(), a collective of the tensor-parallel group that has gradients"
_BY_COPY = (
    "change full = weight.full_tensor(), a collective, and call weight.copy_(full), which takes the part of a rank"
)


def writes(func: Any) -> bool:
    """Return whether a function writes to its first argument."""
    name = func.__name__
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return bool(name.endswith("_"))


def advice(otherwise: str) -> str:
    """Return the remedy: advice for an optimizer if its step is on the call stack, else ``otherwise``."""
    optimizer = calling_optimizer()
    if optimizer is None:
        return otherwise
    return (
        f"{optimizer} needs full tensors and would make other updates than on one process. An optimizer of matrices "
        "(Muon, Shampoo, SOAP, GaLore, Adafactor) gets them by model.matrix_optimizer(cls, parameters, **options)"
    )


def name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func)).strip("_")
