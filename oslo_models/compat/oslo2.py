"""OSLO 2's API: `initialize` shards an existing model in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import local_torch_dtype

from oslo_models import registry
from oslo_models.checkpoint.checksum import tensor_checksum
from oslo_models.compat.any_module import initialize_module
from oslo_models.compat.oslo2_sections import PARALLELISM, apply_sections, check_sections, read_sections
from oslo_models.config.arguments import Arguments
from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.mesh import ParallelMesh, start_process_group, world_axis
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.media.division import IMAGES
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.construction import join, start
from oslo_models.modeling.derived.deriving import DerivedFromConfig
from oslo_models.modeling.full_model import is_full, remove_parallel_state
from oslo_models.modeling.own_plan import class_with_divided_images
from oslo_models.modeling.parallel_class import parallel_class
from oslo_models.modeling.quantizing import check_not_quantized, refuse_layers_of_libraries
from oslo_models.modeling.weight_mapping import WeightMapping
from oslo_models.sharding.plan import Plan

_KEYS = ["enable", *(f.name for f in fields(Arguments) if f.name not in ("deploy", "resize_token_embeddings"))]


def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path,
    tp_mapping: Mapping[Any, Any] | None = None,
    plan: Plan | Callable[[Any], Plan] | str | None = None,
    inputs: Any = None,
) -> Any:
    """Shard a transformers model for this rank, in place. It gets the zoo class of the same name. A collective.

    With ``plan="derive"``, shard a model of any class.

    All ranks get the weights of rank 0. Parameters stay the same objects, so an existing optimizer keeps working if it
    has taken no step yet. Parameters of other pipeline stages are emptied.

    Args:
        model: a full model with weights, of a class that the zoo has.
        config: ``{"model_parallelism": {"tensor_parallel_size": 2}}``, or the path of such a JSON file. Other keys are
            arguments of `ParallelModel.from_config_with_parallel` (``micro_batch_size``, ``seed``, ...), and
            ``"enable": False``, which sets all sizes to one. The section ``activation_checkpointing`` recomputes
            blocks in the backward pass and sets the training mode. With ``partitioned_checkpointing`` each rank keeps
            a part of the block inputs, with ``cpu_checkpointing`` in host memory. ``kernel_fusion`` calls `fuse`.
        tp_mapping: from OSLO 2: the column-parallel and row-parallel layers. Only its names are checked. The model is
            sharded by the plan of its architecture, which gives the same results, or by a derived plan for classes
            outside the zoo.
        plan: a plan to use in place of the zoo's plan; required for a class that the zoo lacks. A `Plan`, a function
            from a configuration to a `Plan`, or ``"derive"``.
        inputs: for ``plan="derive"``, arguments of a call that verifies the plan: a tensor, a tuple or a dictionary of
            arguments by name. Required for a model outside transformers.

    Returns:
        The same object, in its previous mode (training or evaluation); ``deparallelize()`` undoes the sharding.

    Raises:
        ValueError: an argument is invalid, or the models of the ranks differ; on every rank, with the model unchanged.
        RuntimeError: the model is already sharded; or several processes are needed, and no launcher started them.
        OSError: the JSON file cannot be read.
    """
    start_process_group()
    world = world_axis()
    world.set_phase(f"initialization of a {type(model).__name__}")
    with agree(world, "checking arguments of initialize"):
        sections = read_sections(config)
        arguments = _arguments(sections.get(PARALLELISM, {}))
        if plan is not None:
            arguments = replace(arguments, plan=plan)
        arguments.check({})
        if arguments.tower_parallel == IMAGES and not isinstance(model, PreTrainedModel):
            raise ValueError(
                f'tower_parallel="{IMAGES}" is for models of transformers, and this is a {type(model).__name__}: leave '
                "it out"
            )
    if isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        return initialize_module(model, arguments, inputs, world, broadcast_weights)
    with agree(world, "checking arguments of initialize"):
        if tp_mapping is not None and arguments.plan is None and not has_plan(type(model)):
            arguments = replace(arguments, plan="derive")
        if arguments.plan == "derive" and inputs is not None:
            arguments = replace(arguments, plan=DerivedFromConfig(type(model), inputs))
        cls = zoo_class(model, plan=arguments.plan)
        arguments.check_config(cls, model.config)
        if arguments.tower_parallel == IMAGES:
            cls = class_with_divided_images(cls)
        check_sections(sections, model, arguments)
        check_tp_mapping(tp_mapping, model)
        refuse_layers_of_libraries(model)
        check_not_quantized(
            model.state_dict(), "is sharded as it is loaded, or before: quantize_(model, ...) after initialize"
        )
        tensors = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
    others = {name: section for name, section in sections.items() if name != PARALLELISM}
    mesh, _ = join(arguments, model.config, {**tensors, **others}, "initialize")
    with agree(world, "dividing the model"):  # on the meta device first, so that an error leaves the model unchanged
        mapping = WeightMapping(cls, model.config, {}, mesh, arguments.blocks_per_stage)
        if differing := sorted(tensors.keys() ^ mapping.state.keys()):
            raise ValueError(f"the model differs from its configuration in: {differing}")
    _shard(model, cls, mesh, arguments)
    apply_sections(sections, model)
    return model


def _arguments(section: Mapping[str, Any]) -> Arguments:
    """Return the arguments in the section on parallelism."""
    if unknown := [f"{PARALLELISM}.{key}" for key in section.keys() - set(_KEYS)]:
        raise ValueError(f"config has unknown keys {sorted(unknown)}; {PARALLELISM} may have {_KEYS}")
    enable = section.get("enable", True)
    if not isinstance(enable, bool):
        raise ValueError(f"{PARALLELISM}.enable must be true or false, got {enable!r}")
    sizes = (
        *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"),
        *("context_parallel_size", "sequence_parallel", "tensor_parallel_shares", "blocks_per_stage", "schedule"),
        "tower_parallel",
    )
    if section.get("mtp_heads"):
        raise ValueError(
            f"{PARALLELISM}.mtp_heads={section['mtp_heads']!r} is not possible: a loaded model has no heads. Use "
            "from_pretrained_with_parallel(..., mtp_heads=True)"
        )
    left_out = ("enable", *(() if enable else sizes))
    return Arguments(**{key: value for key, value in section.items() if key not in left_out})


def check_tp_mapping(mapping: Mapping[Any, Any] | None, model: PreTrainedModel) -> None:
    """Raise ``ValueError`` if a mapping of OSLO 2 names layers that the model lacks.

    Args:
        mapping: maps a class, or its name, to a list of entries such as ``Column("q_proj", ...)``, ``Row(...)`` and
            ``Update(...)``. An entry is any object with a ``name`` attribute: one name, or several.
    """
    if mapping is None:
        return
    if not isinstance(mapping, Mapping):
        raise ValueError(f"tp_mapping must be a dictionary from classes to lists of layers, got {mapping!r}")
    bases = {base.__name__ for base in type(model).__mro__}
    own = [entries for key, entries in mapping.items() if getattr(key, "__name__", key) in bases]
    if not own:
        raise ValueError(f"tp_mapping has no entry for {type(model).__name__} or a class that it derives from")
    ends = [f".{name}" for name, _ in model.named_modules()]
    for entry in own[0]:
        names = (entry.name,) if isinstance(entry.name, str) else entry.name
        for name in names if type(entry).__name__ != "Update" else ():
            if not any(end.endswith(f".{name}") for end in ends):
                raise ValueError(f"tp_mapping names {name!r}, which {type(model).__name__} lacks")


def has_plan(cls: type[Any]) -> bool:
    """Return whether the zoo has a plan for exactly this class."""
    if issubclass(cls, ParallelModel):
        return True
    try:
        found: Any = registry.find(cls.__name__)
    except AttributeError:
        return False
    return cls in found.__mro__


def zoo_class(model: object, may_be_empty: bool = False, plan: Plan | Callable[[Any], Plan] | str | None = None) -> Any:
    """Return the parallel class for a full transformers model: from the zoo, or with a user's plan.

    Args:
        may_be_empty: allow parameters on the meta device.
        plan: the user's plan.

    Raises:
        ValueError: the zoo lacks the class, or the model has adapters.
        RuntimeError: the model is already sharded.
    """
    if not is_full(model) or hasattr(type(model), "tensor_parallel_config"):
        raise RuntimeError(f"this {type(model).__name__} is already sharded: model.deparallelize() makes it full again")
    if hasattr(model, "_engine"):
        raise RuntimeError(f"this {type(model).__name__} is served by workers: model.cpu() returns its weights")
    if adapters := list(getattr(model, "peft_config", ())):
        raise ValueError(
            f"the model has the adapters {adapters}: shard it without them and add or load them afterwards, or merge "
            "them before (`merge_and_unload()` of the PeftModel)"
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a model of transformers, got a {type(model).__name__}")
    cls = _find_class(type(model)) if plan is None else parallel_class(type(model), plan)
    if not may_be_empty and any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError("the model has no weights (they are on the meta device): use from_config_with_parallel")
    return cls


def _find_class(cls: type[Any]) -> Any:
    if issubclass(cls, ParallelModel):
        return cls
    hint = 'pass plan= to shard it by a plan of your own, or plan="derive"'
    try:
        found: Any = registry.find(cls.__name__)
    except AttributeError as error:
        raise ValueError(f"{error}; {hint}") from None
    if cls not in found.__mro__:
        raise ValueError(f"{cls.__module__}.{cls.__name__} is not the class of transformers; {hint}")
    return found


@torch.no_grad()
def _shard(model: Any, cls: type, mesh: ParallelMesh, arguments: Arguments) -> None:
    """Shard the model for this rank, in place, with the weights of rank 0."""
    full_class = vars(model).get("_full_class", type(model))
    remove_parallel_state(model)
    before: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    broadcast_weights(model, mesh)
    model.__class__, model._full_class = cls, full_class
    with local_torch_dtype(model.dtype, cls.__name__):
        model._shard(mesh, arguments.blocks_per_stage, arguments.sequence_parallel)
    full_names: dict[str, str] = {} if model.stage is None else model.stage.full_names
    parts: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    for name, param in parts.items():  # keep the objects that an optimizer may refer to
        owner, _, leaf = name.rpartition(".")
        old = before[full_names.get(name, name)]
        old.data, old.grad = param.data, None
        model.get_submodule(owner)._parameters[leaf] = old
    here = {id(param) for param in model.parameters()}
    for old in before.values():
        if id(old) not in here:
            old.data, old.grad = old.data.new_empty(0), None
    model.to(mesh.device)
    start(model, arguments)


def broadcast_weights(model: nn.Module, mesh: ParallelMesh) -> None:
    """Give all ranks the weights and buffers of rank 0."""
    if mesh.world.size == 1:
        return
    tensors = [*model.parameters(), *model.buffers()]
    prints = gather_objects(mesh.world, [tensor_checksum(tensor) for tensor in tensors])
    for tensor, *seen in zip(tensors, *prints, strict=True):
        if len(set(seen)) > 1:  # equal tensors are not written, so they may stay in shared memory
            tensor.data.copy_(broadcast(mesh.world, tensor.data.to(mesh.device).contiguous()))
