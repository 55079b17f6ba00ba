"""Adds, selects, disables and deletes adapters of a parallel model, through the layers of ``peft``.

transformers' methods also ask for the version of ``peft`` that their conversions of adapter weights need, a newer one
than these methods need. Adapters of a parallel model are not converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft import PeftConfig, inject_adapter_in_model
from peft.functional import delete_adapter
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper


def add(model: Any, config: Any, name: str | None) -> None:
    """See transformers' ``add_adapter``."""
    name = name or "default"
    if model._hf_peft_config_loaded and name in model.peft_config:
        raise ValueError(f"Adapter with name {name} already exists. Please use a different name.")
    if not isinstance(config, PeftConfig):
        raise TypeError(f"adapter_config should be an instance of PeftConfig. Got {type(config)} instead.")
    config.base_model_name_or_path = vars(model).get("name_or_path")
    inject_adapter_in_model(config, model, name)
    model._hf_peft_config_loaded = True
    select(model, name)


def select(model: Any, names: str | list[str]) -> None:
    """See transformers' ``set_adapter``."""
    _check_loaded(model, [names] if isinstance(names, str) else names)
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            module.set_adapter(names)


def enable(model: Any, is_on: bool) -> None:
    """See transformers' ``enable_adapters`` and ``disable_adapters``."""
    _check_loaded(model)
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            module.enable_adapters(enabled=is_on)


def active(model: Any) -> list[str]:
    """See transformers' ``active_adapters``."""
    _check_loaded(model)
    layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return list(layer.active_adapters)


def delete(model: Any, names: str | list[str]) -> None:
    """See transformers' ``delete_adapter``."""
    names = [names] if isinstance(names, str) else names
    _check_loaded(model, names)
    for name in names:
        delete_adapter(model, name, f"{model.peft_config[name].peft_type.value.lower()}_")
        model.peft_config.pop(name)
    if not model.peft_config:
        del model.peft_config
        model._hf_peft_config_loaded = False


def _check_loaded(model: Any, names: Sequence[str] = ()) -> None:
    if not model._hf_peft_config_loaded:
        raise ValueError("No adapter loaded. Please load an adapter first.")
    for name in names:
        if name not in model.peft_config:
            known = list(model.peft_config)
            raise ValueError(f"Adapter with name {name} not found. Please pass the correct adapter name among {known}")
