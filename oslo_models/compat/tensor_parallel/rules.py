"""Applies a `Config` to a module of any class: shards its tensors, and adds the collectives that its rules ask for.

The ranks compute one function together; its value is the output of rank 0. Each collective has the gradient of this
function. Gradients of activations and of full parameters are therefore partial on each rank. They are all-reduced where
the backward pass ends: at the arguments of the model and at its full parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from oslo_models.compat.tensor_parallel.config import Config
from oslo_models.compat.tensor_parallel.state_actions import resolved
from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.collectives import all_gather, all_reduce
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.rng import synchronize
from oslo_models.modeling.apply_plan import set_local_sizes
from oslo_models.modeling.derived.module import DerivedModule
from oslo_models.modeling.derived.report import ShardingReport, report_of_layouts
from oslo_models.modeling.quantizing import shard_of
from oslo_models.registry import did_you_mean
from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class Rules:
    """Applies the rules of a `Config` to a module. Called where a user's plan would be applied.

    Attributes:
        config: the rules.
    """

    config: Config

    @torch.no_grad()
    def __call__(self, model: Any, mesh: ParallelMesh) -> dict[str, Layout]:
        """Shard a full module for this rank, in place. Return the layouts of its tensors.

        Raises:
            ValueError: a rule matches no name, or does not fit a tensor or module with a matching name.
        """
        tp, config = mesh.tp, self.config
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        names = dict(model.named_modules())
        config.check_names(tensors, names)
        placed = config.layouts(tensors, tp.size)
        for name, module in names.items():
            _set_attributes(name, module, config.actions("attr", name), tp)
        made: dict[int, Tensor] = {}
        for name, full in tensors.items():
            _place(model, name, full, placed[name], tp, made)
        layouts = {name: layout for name, (layout, _) in placed.items()}
        if tp.size > 1:
            model.register_forward_pre_hook(partial(_enter, tp, layouts), with_kwargs=True)
        for name, module in names.items():
            inputs, outputs = config.actions("input", name), config.actions("output", name)
            if inputs:
                module.register_forward_pre_hook(partial(_change_inputs, name, inputs, tp), with_kwargs=True)
            if outputs:
                module.register_forward_hook(partial(_change_outputs, name, outputs, tp))
        if tp.size > 1:
            model.register_forward_hook(partial(_leave, mesh))
        return layouts


def _set_attributes(name: str, module: nn.Module, actions: Mapping[Any, Any], tp: Axis) -> None:
    for attribute, action in actions.items():
        if not hasattr(module, str(attribute)):
            hint = did_you_mean(str(attribute), vars(module))
            raise ValueError(f"attr_rules: {name}, a {type(module).__name__}, has no attribute {attribute!r}{hint}")
        setattr(module, attribute, resolved(action, tp.size)(getattr(module, attribute), rank=tp.rank))


def _place(model: nn.Module, name: str, full: Tensor, placed: Any, tp: Axis, made: dict[int, Tensor]) -> None:
    """Replace a tensor by its local shard; ``made`` keeps the shards for tied tensors."""
    (layout, action), (owner, _, leaf) = placed, name.rpartition(".")
    module = model.get_submodule(owner)
    if action is not None:
        if not isinstance(full, nn.Parameter):
            raise ValueError(f"the state rule for the buffer {name} does not return shards of it")
        action(full, rank=tp.rank)  # an action that does not fit raises here, not in the first forward pass
        cls: Any = type(module)
        module.__class__ = _computing(cls, leaf, action, tp.rank)
    elif layout.dim is not None:
        if id(full) not in made:
            local = shard_of(full.detach(), layout, tp.rank, name)
            made[id(full)] = nn.Parameter(local, full.requires_grad) if isinstance(full, nn.Parameter) else local
        held: Any = module._parameters if isinstance(full, nn.Parameter) else module._buffers
        held[leaf] = made[id(full)]
    else:
        return
    set_local_sizes(module)


def _computing(cls: type[nn.Module], leaf: str, action: Any, rank: int) -> type[nn.Module]:
    """Return a subclass that stores a full parameter, and applies an action to it at each read.

    An optimizer therefore takes the same step as on one process, for any action.
    """
    value = property(lambda module: action(module._parameters[leaf], rank=rank))
    return type(cls.__name__, (cls,), {leaf: value, "__module__": cls.__module__})


# Operations -----------------------------------------------------------------------------------------------------------


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return all_reduce(tp, x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.tp), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, dim: int) -> Tensor:
        ones = (1,) * tp.size
        sizes = all_gather(tp, torch.tensor([x.shape[dim]], device=x.device), 0, ones).tolist()
        ctx.tp, ctx.place = tp, (dim, sum(sizes[: tp.rank]), sizes[tp.rank])
        return all_gather(tp, x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grad, ctx.tp).narrow(*ctx.place).contiguous(), None, None


class _OfFirst(torch.autograd.Function):
    """Identity forward. Backward keeps the gradient of rank 0 only, because all ranks get the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.tp.rank == 0 else torch.zeros_like(grad), None


def _applied(action: Any, value: Any, tp: Axis, what: str) -> Any:
    action = action[0] if isinstance(action, tuple) else action
    if not isinstance(action, str):
        return resolved(action, tp.size)(value, rank=tp.rank)
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ValueError(f"{action!r} is for tensors, and {what} is a {type(value).__name__}: use a function")
    name, *dims = action.split()
    if name in ("split", "scale") or tp.size == 1:
        return value if tp.size == 1 else resolved(action, tp.size)(value, rank=tp.rank)
    return (
        _Sum.apply(value, tp)
        if name == "sum"
        else _Gather.apply(value, tp, int(dims[0] if dims else "-1") % value.dim())
    )


def _change_inputs(
    name: str, actions: Mapping[int | str, Any], tp: Axis, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Apply the input rules to the arguments of a call. An argument may be passed by position or by name."""
    parameters = [*inspect.signature(module.forward).parameters]
    args, kwargs = list(args), dict(kwargs)
    for key, action in actions.items():
        index = key if isinstance(key, int) else parameters.index(key) if key in parameters else len(args)
        word = key if isinstance(key, str) else parameters[key] if key < len(parameters) else ""
        what = f"argument {key!r} of {name or 'the model'}"
        if index < len(args):
            args[index] = _applied(action, args[index], tp, what)
        elif word in kwargs:
            kwargs[word] = _applied(action, kwargs[word], tp, what)
    return tuple(args), kwargs


def _change_outputs(
    name: str, actions: Mapping[int | str, Any], tp: Axis, module: nn.Module, args: Any, output: Any
) -> Any:
    """Apply the output rules to the output of a module."""
    is_tuple, is_mapping = isinstance(output, (tuple, list)), isinstance(output, Mapping)
    values = dict(enumerate(output)) if is_tuple else dict(output) if is_mapping else {0: output}
    for key, action in actions.items():
        key = [*values][key] if is_mapping and isinstance(key, int) and key < len(values) else key
        if key not in values:
            raise ValueError(f"output_rules: {name or 'the model'} returns no {key!r}, but {[*values]}")
        values[key] = _applied(action, values[key], tp, f"output {key!r} of {name or 'the model'}")
    if is_mapping:
        for key, value in values.items():
            output[key] = value
        return output
    if is_tuple:
        return type(output)(*values.values()) if hasattr(output, "_fields") else type(output)(values.values())
    return values[0]


# The boundary of the model --------------------------------------------------------------------------------------------


def _enter(tp: Axis, layouts: Mapping[str, Layout], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """All-reduce the gradients of arguments and of replicated parameters."""
    if not torch.is_grad_enabled():
        return None
    for name, param in module.named_parameters():
        if param.requires_grad and layouts[name].dim is None and "is_summed" not in vars(param):
            param.is_summed = param.register_hook(partial(_summed, tp))  # type: ignore[attr-defined]
    return tree_map_only(Tensor, partial(copy_to, tp), (args, kwargs))


def _summed(tp: Axis, grad: Tensor) -> Tensor:
    return all_reduce(tp, grad.clone(memory_format=torch.contiguous_format))


def _leave(mesh: ParallelMesh, module: nn.Module, args: Any, output: Any) -> Any:
    if module.training and mesh.tp.threads is None:  # dropout may have drawn more random numbers on some ranks
        synchronize(mesh.tp, mesh.device)
    if not torch.is_grad_enabled():
        return None
    return tree_map_only(Tensor, lambda x: _OfFirst.apply(x, mesh.tp) if x.requires_grad else x, output)


class RuledModule(DerivedModule):
    """Parallel base class of a module that the rules of a `Config` shard."""

    derived_plan: Any

    def _mark_parameters(self) -> None:
        """Leave parameters plain, because layers and code of any class compute with them."""

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters of the full model, as transformers counts them."""
        embeddings = [name for name, module in self.named_modules() if isinstance(module, nn.Embedding)]
        excluded = {f"{name}.weight" for name in embeddings if exclude_embeddings}
        return sum(
            prod(self.layouts[name].shape)
            for name, param in self.named_parameters()
            if name not in excluded and (param.requires_grad or not only_trainable)
        )

    def sharding_report(self) -> ShardingReport:
        """Report the sharded dimension of each tensor."""
        return report_of_layouts(self, self.layouts)


def ruled_class(cls: type[Any], config: Config) -> Any:
    """Return the parallel class for a module class and the rules of a `Config`."""
    namespace = {"derived_plan": Rules(config), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (RuledModule, cls), namespace)
