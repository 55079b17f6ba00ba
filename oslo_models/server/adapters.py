"""Adapters of ``oslo-models serve --adapter NAME=PATH``: parses, checks and loads them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment


def parse_adapters(given: Sequence[str], models: Sequence[str]) -> dict[str, Path]:
    """Return the directories of adapters by name.

    Args:
        given: options in the form ``NAME=PATH``.
        models: the names of the served models.

    Raises:
        ValueError: an option has another form, a name is used twice, or the server has several models.
        FileNotFoundError: a directory has no adapter saved by ``peft``.
    """
    if given and len(models) > 1:
        raise ValueError(f"--adapter needs a server of one model, not of {len(models)}: start a server for each model")
    found: dict[str, Path] = {}
    for each in given:
        name, separator, path = each.partition("=")
        if not (name and separator and path):
            raise ValueError(f"--adapter {each}: pass it as NAME=PATH")
        if name in found or name in models:
            raise ValueError(f"--adapter {each}: the name {name!r} is taken; requests choose by name, so use another")
        if not (Path(path) / "adapter_config.json").is_file():
            raise FileNotFoundError(f"--adapter {each}: {path} is not a directory with the adapter_config.json of peft")
        found[name] = Path(path)
    return found


def check_adapters(kind: type[Any], config: Any, adapters: Mapping[str, Path]) -> None:
    """Check that adapters fit a model. The check creates the model without memory for weights.

    Args:
        kind: the class of the model.

    Raises:
        ValueError: an adapter is for another model, or disabling it would not restore the base model exactly.
        ImportError: ``peft`` is not installed.
    """
    for name, folder in adapters.items():
        try:
            _check_adapter(kind, config, folder)
        except ImportError:
            raise
        except Exception as error:
            cause = "" if isinstance(error, (ValueError, RuntimeError)) else f"{type(error).__name__}: "
            raise ValueError(
                f"--adapter {name}={folder} does not fit this {config.model_type} model: {cause}{error}"
            ) from error


def _check_adapter(kind: type[Any], config: Any, folder: Path) -> None:
    from peft import PeftType, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict

    from oslo_models.modeling.adapters.saved_config import read_adapter_config

    adapter = read_adapter_config(str(folder))
    if adapter.peft_type != PeftType.LORA:
        raise ValueError(
            f"it has the type {adapter.peft_type.value}, but requests can choose LoRA only. Merge it instead"
        )
    weights = load_peft_weights(str(folder), device="cpu")
    if others := sorted(name for name in weights if "lora_" not in name):
        raise ValueError(
            f"it has {others[0]}, which would stay in the model for other requests (modules_to_save, bias=, saved "
            "embeddings); train it without them, or merge it and serve the result"
        )
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config))
    inject_adapter_in_model(adapter, model, "checked", low_cpu_mem_usage=True)
    result: Any = set_peft_model_state_dict(model, weights, adapter_name="checked", low_cpu_mem_usage=True)
    missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        found = [
            *(f"{each} is missing" for each in missing),
            *(f"{each} is too much" for each in result.unexpected_keys),
        ]
        raise ValueError(f"of its tensors, {found[0]} ({len(found)} differ)")


def load_adapters(model: Deployment, adapters: Mapping[str, Path]) -> dict[str, str]:
    """Load adapters into a deployed model.

    Returns:
        The adapters' names in the model, by their names for clients. `peft` allows no dots in names.
    """
    loaded = {}
    for number, (name, folder) in enumerate(adapters.items()):
        loaded[name] = f"served_{number}"
        model.load_adapter(folder, loaded[name])
    return loaded
