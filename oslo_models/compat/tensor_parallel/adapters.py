"""PEFT adapters on a thread-parallel model: ``peft`` wraps the modules of one part, and the other parts follow."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.distributed.callers import PeftCall, object_under_construction, peft_call
from oslo_models.distributed.rng import default_generator
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.modeling.adapters.adaptable import AdaptableModel
from oslo_models.modeling.original_class import original_class

_SEE_ONE_PART = {
    *("inject_adapter", "_maybe_include_all_linear_layers", "_get_tuner_state_dict_key_prefixes"),
    *("_get_learnable_bias_state_dict", "get_peft_model_state_dict", "set_peft_model_state_dict"),
    "get_embedding_layer_name",
}
"""Functions of ``peft`` that match module names with adapter configurations and with full tensors."""


class AdaptableThreads(AdaptableModel):
    """Adapter support for a thread-parallel model.

    Where ``peft`` matches names, `named_modules` yields the modules of the first part under their full-model names.
    Elsewhere it yields the modules of all parts, so that adapters are selected, disabled and merged in every part.
    """

    parts: nn.ModuleList
    threads: ThreadGroup

    def adopt_adapters(self, are_new: bool = False) -> None:
        """Extend `AdaptableModel.adopt_adapters`: copy the adapters of the first part to the other parts."""
        configs = self._peft_config
        if configs is None:
            return
        new = [name for name in configs if self._adopted.get(name) is not configs[name]]
        if new:
            _adopt(self, new)
        self._adopted = dict(configs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield named modules; for the name matching of ``peft``, the modules of the first part only."""
        named = nn.Module.named_modules(self, memo, prefix, remove_duplicate)
        call = peft_call()
        if call is not None and call.function == "add_weighted_adapter":
            # Only the first part has the new adapter so far, and peft combines the adapters of all parts.
            self.adopt_adapters(are_new=True)
        if call is None or not _sees_one_part(call):
            return named
        if call.function == "inject_adapter":
            from oslo_models.modeling.adapters.support import check_combination

            check_combination(call)
            self._rng_before_adapters = default_generator(torch.get_default_device()).get_state()
        return _of_first_part(named, "")

    def get_submodule(self, target: str) -> nn.Module:
        """Return the submodule. ``peft`` also finds modules of the first part by their full-model names.

        Raises:
            ValueError: ``peft`` looks for embeddings to make a prompt encoder.
        """
        if peft_call() is None:
            return nn.Module.get_submodule(self, target)
        if target == "embeddings.word_embeddings":
            raise ValueError(
                "prompts do not work on a model of tensor_parallel with threads as ranks: use LoRA or IA3, or start "
                "one process per device with torchrun and call tensor_parallel(model, distributed=True) before "
                "get_peft_model"
            )
        if target == "parts" or target.startswith("parts."):
            return nn.Module.get_submodule(self, target)
        return self.parts[0].get_submodule(target)

    def get_input_embeddings(self) -> nn.Module:
        """Raise ``NotImplementedError``, which transformers expects where a model has no single embedding.

        Each part has its own shard of the embeddings. ``peft`` gets the shard of the first part.
        """
        if peft_call() is not None:
            return self._first_part().get_input_embeddings()
        raise NotImplementedError(
            "the embeddings are sharded: model.parts[0].get_input_embeddings() has the first part"
        )

    def get_output_embeddings(self) -> Any:
        """Return the output embeddings; for ``peft``, the output embeddings of the first part."""
        if peft_call() is not None:
            return self._first_part().get_output_embeddings()
        return super().get_output_embeddings()

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter. Takes the arguments of `AdaptableModel.load_adapter`."""
        from oslo_models.modeling.adapters.loading import load_adapter

        return load_adapter(self, *args, **kwargs)

    def _first_part(self) -> Any:
        return self.parts[0]


def _sees_one_part(call: PeftCall | None) -> bool:
    """Return whether a function of ``peft`` gets the modules of the first part only."""
    # `_mark_only_adapters_as_trainable` freezes every parameter outside the modules it gets, so it sees all parts.
    return call is not None and call.function in _SEE_ONE_PART and call.caller != "_mark_only_adapters_as_trainable"


def _of_first_part(named: Iterator[tuple[str, nn.Module]], model: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside the parts, and the modules of the first part under their full-model names.

    Args:
        model: name prefix of the thread-parallel model.
    """
    parts = f"{model}parts"
    for name, module in named:
        if name == parts or name.startswith(f"{parts}."):
            rank, _, inner = name[len(parts) + 1 :].partition(".")
            if rank == "0" and inner:
                yield model + inner, module
        else:
            yield name, module


# Adopting -------------------------------------------------------------------------------------------------------------


def _adopt(model: Any, names: list[str]) -> None:
    """Add adapters of the first part to the other parts, and make them parallel."""
    from peft import inject_adapter_in_model

    configs = model.peft_config
    if any(config.is_prompt_learning for config in configs.values()):
        return

    def adopt_on(rank: int) -> None:
        part = model.parts[rank]
        for name in names:
            if rank > 0:
                inject_adapter_in_model(configs[name], part, name)
            else:
                part._rng_before_adapters = model._rng_before_adapters
                part.peft_config = {**(part._peft_config or {}), name: configs[name]}

    model.threads.run(adopt_on)
    for part in model.parts:
        part._peft_config = configs
    _follow_first_part(model.parts)
    peft_model: Any = object_under_construction("PeftModel")
    if peft_model is not None and not isinstance(peft_model, ThreadsPeftModel):
        cls: Any = type(peft_model)
        peft_model.__class__ = _threads_peft_class(cls)


def _follow_first_part(parts: Any) -> None:
    """Copy the selected adapters and trainable flags of the first part to all parts.

    Copies of gathering modules gather from the same modules of all ranks.
    """
    named = [dict(part.named_modules(remove_duplicate=False)) for part in parts]
    for name, first in named[0].items():
        modules = tuple(of_part[name] for of_part in named)
        for module in modules:
            for state in ("_active_adapter", "_disable_adapters"):
                if state in vars(first):
                    vars(module)[state] = copy.copy(vars(first)[state])
            for leaf, param in module.named_parameters(recurse=False):
                of_first: Any = first._parameters[leaf]
                param.requires_grad_(of_first.requires_grad)
            if "_of_ranks" in vars(first):
                vars(module)["_of_ranks"] = modules


class ThreadsPeftModel:
    """Mixin before the class of a ``PeftModel`` around a thread-parallel model."""

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield named modules; for the name matching of ``peft``, the modules of the first part only."""
        named = nn.Module.named_modules(self, memo, prefix, remove_duplicate)  # type: ignore[arg-type]
        return _of_first_part(named, "base_model.model.") if _sees_one_part(peft_call()) else named

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter as ``PeftModel`` does, then to all parts."""
        peft_model: Any = self
        super().add_adapter(*args, **kwargs)  # type: ignore[misc]
        peft_model.get_base_model().adopt_adapters(are_new=True)

    def _get_base_model_class(self, *args: Any, **kwargs: Any) -> type:
        """Return the transformers class, so that the saved adapter loads without this library."""
        found: type = original_class(super()._get_base_model_class(*args, **kwargs))  # type: ignore[misc]
        return found


@cache
def _threads_peft_class(cls: Any) -> type:
    return type(cls.__name__, (ThreadsPeftModel, cls), {"__module__": cls.__module__})


# Sharding models with adapters ----------------------------------------------------------------------------------------


def shard_with_adapters(model: Any, shard: Callable[[Any], Any]) -> Any:
    """Shard a full model with adapters: shard the base model, then add the adapters again and load their values.

    Args:
        model: a ``PeftModel``, or a transformers model with adapters; it is not changed.
        shard: shards a full model without adapters over threads.

    Raises:
        ValueError: an adapter is merged, or threads do not support its kind.
    """
    from peft import PeftModel, inject_adapter_in_model

    from oslo_models.modeling.adapters.adoption import wrapped_layers

    peft_model = model if isinstance(model, PeftModel) else None
    base: Any = model if peft_model is None else peft_model.get_base_model()
    for path, tuner in wrapped_layers(base):
        if tuner.merged:
            raise ValueError(f"adapters are merged into the weights, such as {path}: call unmerge_adapter() before")
    if prompts := [name for name, config in model.peft_config.items() if config.is_prompt_learning]:
        raise ValueError(
            f"the adapters {prompts} are prompts, which do not work on a model with threads as ranks: use LoRA or "
            "IA3, or tensor_parallel(model, distributed=True) before get_peft_model"
        )
    sharded = shard(_without_adapters(base))
    configs = copy.deepcopy(model.peft_config)
    result = sharded
    with torch.random.fork_rng(devices=[]):
        for name, config in configs.items():
            if peft_model is None:
                inject_adapter_in_model(config, sharded, name)
            elif result is sharded:
                result = type(peft_model)(sharded, config, name)
            else:
                result.add_adapter(name, config)
    sharded._hf_peft_config_loaded = base._hf_peft_config_loaded
    missing, unexpected = sharded.load_state_dict(_adapter_tensors(base), strict=False)
    assert not unexpected, (missing, unexpected)
    if peft_model is not None:
        result.set_adapter(peft_model.active_adapter)
    _like(sharded.parts[0], base)
    _follow_first_part(sharded.parts)
    return result.train(model.training)


def _without_adapters(base: Any) -> Any:
    """Return a model with the same parameters but without adapters; ``base`` keeps its adapters."""
    from oslo_models.modeling.adapters.adoption import unwrapped

    plain = copy.deepcopy(base, {id(tensor): tensor for tensor in base.parameters()})
    for module in list(plain.modules()):
        for leaf, child in module.named_children():
            if (inner := unwrapped(child)) is not child:
                setattr(module, leaf, inner)
    if "peft_config" in vars(plain):
        del plain.peft_config
    plain._hf_peft_config_loaded = False
    return plain


def _adapter_tensors(base: Any) -> dict[str, Tensor]:
    """Return the adapter tensors of a full model, and its trained copies of whole modules, by name."""
    from oslo_models.modeling.adapters.adoption import plain_name

    names = {name for name, _ in _without_adapters(base).named_parameters(remove_duplicate=False)}
    return {
        name: tensor
        for name, tensor in base.state_dict().items()
        if plain_name(name, ()) not in names and "original_module." not in name
    }


def _like(part: Any, full: Any) -> None:
    """Copy the selected adapters and trainable flags of a full model to the first part."""
    own: dict[str, Any] = dict(part.named_modules(remove_duplicate=False))
    for name, module in full.named_modules(remove_duplicate=False):
        if name in own:
            for state in ("_active_adapter", "_disable_adapters"):
                if state in vars(module):
                    vars(own[name])[state] = copy.copy(vars(module)[state])
            params = dict(own[name].named_parameters(recurse=False))
            for leaf, param in module.named_parameters(recurse=False):
                if leaf in params:
                    params[leaf].requires_grad_(param.requires_grad)
