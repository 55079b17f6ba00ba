"""Implements transformers' ``load_adapter`` for a sharded model without a ``PeftModel``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftConfig, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict

from oslo_models.modeling.adapters.saved_config import read_adapter_config


def load_adapter(
    model: Any,
    peft_model_id: str | Path | None = None,
    adapter_name: str | None = None,
    peft_config: Any = None,
    adapter_state_dict: dict[str, Any] | None = None,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    """Add an adapter to a sharded model and load its weights. This is a collective of all ranks."""
    name = adapter_name or "default"
    if unknown := sorted(key for key, value in kwargs.items() if value not in (None, False, "auto", {})):
        raise ValueError(
            f"load_adapter of a sharded model does not take {unknown}; use peft's PeftModel.from_pretrained"
        )
    if peft_model_id is None and (peft_config is None or adapter_state_dict is None):
        raise ValueError("load_adapter needs peft_model_id, or peft_config with adapter_state_dict")
    if model._hf_peft_config_loaded and name in model.peft_config:
        raise ValueError(f"there is an adapter {name!r} already: pass another adapter_name")
    if peft_config is None:
        peft_config = read_adapter_config(str(peft_model_id))
    elif isinstance(peft_config, dict):
        peft_config = PeftConfig.from_peft_type(**peft_config)
    peft_config.inference_mode = not is_trainable
    weights = load_peft_weights(str(peft_model_id), device="cpu") if adapter_state_dict is None else adapter_state_dict
    inject_adapter_in_model(peft_config, model, name)
    model._hf_peft_config_loaded = True
    result = set_peft_model_state_dict(model, weights, adapter_name=name)
    model.set_adapter(name)
    if not is_trainable:
        model.eval()
    return result
