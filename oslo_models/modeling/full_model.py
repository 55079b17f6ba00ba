"""Converts a sharded model to a full model in place, and removes the attributes of parallel models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.checkpoint.gather import gather_full_tensor
from oslo_models.checkpoint.tensor_info import gather_infos, merge_stages
from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import agree
from oslo_models.distributed.sharded_tensor import local_tensor, unmark_parameter
from oslo_models.modeling.internals import ParallelModelInternals
from oslo_models.modeling.original_class import original_class
from oslo_models.modeling.quantizing import check_not_quantized


def is_full(model: object) -> bool:
    """Whether this process holds all weights: a transformers model, or a parallel model of sizes 1."""
    mesh = getattr(model, "mesh", None)
    return mesh is None or (mesh.weights.size == 1 and not mesh.has_experts_over_replicas)


def remove_parallel_state(model: ParallelModelInternals) -> None:
    """Remove the attributes of a parallel model of sizes 1 from a full model, in place."""
    if getattr(model, "_fusion", None) is not None:
        model.unfuse()
    _release_attention(model)
    mesh = vars(model).get("mesh")
    if mesh is not None:
        for param in model.parameters():
            unmark_parameter(param)
        mesh.destroy()
    vars(model.base_model).pop("mpu", None)
    for name in _attributes(type(model)):
        vars(model).pop(name, None)


def _release_attention(model: ParallelModelInternals) -> None:
    """Select torch's attention, unless the user has named another one."""
    if (choice := getattr(model, "_attention_choice", None)) is not None:
        choice.select(training=False)
        model._attention_choice = None


def plain_view(model: nn.Module) -> Any:
    """Return a full model itself, or a parallel model of sizes 1 as an object of its transformers class.

    Raises:
        ValueError: the model is fused.
    """
    cls: Any = type(model)
    if not hasattr(cls, "deparallelize"):
        return model
    if model._fusion is not None:
        raise ValueError(f"the {cls.__name__} is fused: call unfuse() before")
    original = original_class(cls)
    view = original.__new__(original)
    attributes = _attributes(cls)
    vars(view).update({name: value for name, value in vars(model).items() if name not in attributes})
    return view


def _attributes(cls: type) -> set[str]:
    """Return the attribute names that the parallel base classes of ``cls`` define."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("oslo_models.modeling.")]
    return {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", {}))}


@torch.no_grad()
def make_full(model: ParallelModelInternals) -> None:
    """Implement `ParallelizedModel.deparallelize`."""
    mesh: ParallelMesh | None = model.mesh
    cls = vars(model).get("_full_class", type(model))
    if mesh is not None and mesh.is_sharded:
        mesh.world.set_phase(f"gathering a {type(model).__name__}")
        with agree(mesh.world, "checking the model"):
            if adapters := list(getattr(model, "peft_config", ())):
                raise ValueError(
                    f"the model has the adapters {adapters}: remove them (`unload()` of the PeftModel) or merge them "
                    "(`merge_and_unload()`) before deparallelize"
                )
            check_not_quantized(model.state_dict(), "shards of quantised weights are not gathered: load it again")
        model.unfuse()
        _release_attention(model)
        _replace_modules(model, cls, _gather(model, mesh))
        mesh.world.set_phase("after gathering")
    remove_parallel_state(model)
    model.__class__ = cls
    if hasattr(cls, "deparallelize"):  # a parallel class that transformers' methods constructed
        model.layouts = {}


def _gather(model: ParallelModelInternals, mesh: ParallelMesh) -> dict[str, Tensor]:
    """Gather the full tensors in host memory on every rank, with tied tensors under one of their names."""
    tensors, layouts = model._full_names(model.state_dict())
    tied = model._tied_names()
    _, stages = gather_infos("gathering the model", tensors, layouts, mesh, tied)
    full = {}
    for name, info in merge_stages(stages, tied)[0].items():
        own = local_tensor(tensors[name]).detach() if info.stage == mesh.pp.rank else None
        tensor = gather_full_tensor(own, info.layout, info.dtype, info.stage, mesh)
        if tensor is None or tensor is own:
            tensor = torch.empty(info.layout.shape, dtype=info.dtype) if tensor is None else tensor.clone()
        full[name] = broadcast(mesh.world, tensor.to(mesh.device)).cpu()
    return full


def _replace_modules(model: ParallelModelInternals, cls: Any, tensors: dict[str, Tensor]) -> None:
    """Give the model the modules of a full model with these tensors. Local parameters stay the same objects."""
    full_names = {} if model.stage is None else model.stage.full_names
    named = model.named_parameters(remove_duplicate=False)
    before = {full_names.get(name, name): param for name, param in named}
    config, attention = model._copied_config(), model.config._attn_implementation
    full = cls.from_pretrained(
        None, config=config, state_dict=tensors, dtype=model.dtype, attn_implementation=attention
    )
    for name, param in list(full.named_parameters(remove_duplicate=False)):
        old: nn.Parameter | None = before.get(name)
        values = tensors.get(name, param.data).to(param.device)  # keep its dtype, which may differ from the model's
        if old is None:
            param.data = values
            continue
        unmark_parameter(old)
        old.data, old.grad = values, None
        owner, _, leaf = name.rpartition(".")
        full.get_submodule(owner)._parameters[leaf] = old
    full.train(model.training)
    if model.stage is None:
        full.config = model.config
    if full.can_generate():
        full.generation_config = model.generation_config
    full.name_or_path = model.name_or_path
    hooks = "_require_grads_hook"  # transformers' hooks of removed modules
    own = {name: value for name, value in vars(model).items() if name not in vars(full) and not name.startswith(hooks)}
    vars(model).clear()
    vars(model).update(vars(full) | own)
