"""Saves adapters of a sharded model with ``peft``'s own code, from a full model.

World rank 0 builds the full model with its adapters on the meta device and asks ``peft`` which tensors it would save.
All ranks gather these tensors one at a time. World rank 0 puts them into the full model and saves it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import Tensor

from oslo_models.checkpoint.gather import gather_full_tensor
from oslo_models.distributed.object_exchange import agree, broadcast_object, gather_objects
from oslo_models.distributed.rng import default_generator
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.modeling.internals import ParallelModelInternals
from oslo_models.modeling.original_class import original_class

PREFIX = "base_model.model."
"""The prefix of a model's parameter names in a ``PeftModel``."""


def save_peft_model(
    peft_model: Any, save_directory: Any, selected: Sequence[str] | None, save_embedding_layers: Any, **options: Any
) -> None:
    """Implement ``PeftModel.save_pretrained`` for a sharded model. This is a collective of all ranks."""
    model, names = peft_model.get_base_model(), list(peft_model.peft_config if selected is None else selected)
    configs = _full_configs(model, peft_model.peft_config)

    def wanted(full: Any, state: dict[str, Tensor]) -> Iterable[Tensor]:
        for name in names:
            saved = get_peft_model_state_dict(
                full, state_dict=state, adapter_name=name, save_embedding_layers=save_embedding_layers
            )
            yield from saved.values()

    def make() -> Any:
        full: Any = None
        for name, config in configs.items():
            if full is None:
                full = peft_model.plain_class(_plain_model(model), copy.deepcopy(config), name, low_cpu_mem_usage=True)
            else:
                full.add_adapter(name, copy.deepcopy(config), low_cpu_mem_usage=True)
        full.peft_config.update(configs)  # classification models extend their configurations
        return full

    def save(full: Any) -> None:
        full.save_pretrained(
            save_directory, selected_adapters=selected, save_embedding_layers=save_embedding_layers, **options
        )

    _save(model, make, wanted, PREFIX, save, save_directory)


def save_injected(model: ParallelModelInternals, save_directory: Any, **options: Any) -> None:
    """Save the active adapter of a sharded model like transformers' ``save_pretrained``."""
    configs = _full_configs(model, model.peft_config)
    active = model.active_adapters()

    def make() -> Any:
        full = _plain_model(model)
        for name, config in configs.items():
            full.add_adapter(copy.deepcopy(config), name)
        full.peft_config.update(configs)
        full.set_adapter(active)
        return full

    def wanted(full: Any, state: dict[str, Tensor]) -> Iterable[Tensor]:
        return get_peft_model_state_dict(full, state_dict=state, adapter_name=active[0]).values()

    def save(full: Any) -> None:
        full.save_pretrained(save_directory, **options)

    _save(model, make, wanted, "", save, save_directory)


@torch.no_grad()
def _save(model: ParallelModelInternals, make: Any, wanted: Any, prefix: str, save: Any, save_directory: Any) -> None:
    """Build the full model on world rank 0, gather the tensors to save, and save the model.

    Args:
        make: builds the full model with its adapters.
        wanted: maps the full model and its state dict to the tensors that are saved.
        prefix: the prefix of the names of ``model`` in the full model's state dict.
        save: saves the full model.
    """
    mesh, full, names = model.mesh, None, []
    mesh.world.set_phase(f"saving adapters to {save_directory}")
    with agree(mesh.world, f"saving adapters to {save_directory}"):
        if mesh.world.rank == 0:
            full = _without_draws(make)
            state = full.state_dict()
            tensors = {id(tensor) for tensor in wanted(full, state)}
            names = [name.removeprefix(prefix) for name, tensor in state.items() if id(tensor) in tensors]
    gathered = gather_parameters(model, broadcast_object(mesh.world, names))
    with agree(mesh.world, f"saving adapters to {save_directory}"):
        if full is not None:
            full.load_state_dict({prefix + name: x for name, x in gathered.items()}, strict=False, assign=True)
            save(full)
    mesh.world.set_phase("after saving")


def gather_parameters(model: ParallelModelInternals, names: Sequence[str]) -> dict[str, Tensor]:
    """Gather parameters on world rank 0, by their names in the full model. This is a collective of all ranks."""
    mesh = model.mesh
    full_names = {} if model.stage is None else model.stage.full_names
    params = dict(model.named_parameters(remove_duplicate=False))
    own = {full_names.get(name, name): (name, param) for name, param in params.items()}
    own |= {name: (name, param) for name, param in params.items()}  # also by the names that peft gave them
    described = {name: (own[name][1].dtype, model.layouts[own[name][0]]) for name in names if name in own}
    stages = gather_objects(mesh.pp, described)
    gathered = {}
    for name in names:
        stage = next(stage for stage, held in enumerate(stages) if name in held)
        dtype, layout = stages[stage][name]
        tensor = local_tensor(own[name][1]) if stage == mesh.pp.rank else None
        full = gather_full_tensor(tensor, layout, dtype, stage, mesh)
        if full is not None:
            gathered[name] = full
    return gathered


def _full_configs(model: ParallelModelInternals, configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter configurations with the target modules of all pipeline stages (for ``"all-linear"``)."""
    found = {name: copy.deepcopy(config) for name, config in configs.items()}
    for config in found.values():
        targets = getattr(config, "target_modules", None)
        of_stages = gather_objects(model.mesh.pp, targets)
        if isinstance(targets, set):
            config.target_modules = set().union(*of_stages)
    return found


def _plain_model(model: ParallelModelInternals) -> Any:
    """Construct a full transformers model of the same class and configuration, on the meta device."""
    cls = original_class(type(model))
    with torch.device("meta"):
        full = cls._from_config(model._copied_config(), dtype=model.dtype)
    full.name_or_path = model.name_or_path
    return full


def _without_draws(make: Any) -> Any:
    generator = default_generator(torch.get_default_device())
    before = generator.get_state()
    try:
        return make()
    finally:
        generator.set_state(before)
