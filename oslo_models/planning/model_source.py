"""Finds the class and the configuration of a planned model. Downloads only the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from oslo_models import registry
from oslo_models.auto import AutoModelForCausalLM, config_for
from oslo_models.checkpoint import current_folder
from oslo_models.config.sources import auto_config, copy_config, read_raw

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "WithLMHead", "Model")
"""Endings of class names, in the order in which a configuration without ``architectures`` is read."""


def find_model(model: Any) -> tuple[Any, PreTrainedConfig]:
    """Return the zoo class and the configuration of a model.

    Args:
        model: a model, a configuration, a name on the hub, a directory, or a ``config.json`` file.

    Raises:
        OSError: there is no such configuration.
        ValueError: the zoo has no class for it.
    """
    if isinstance(model, PreTrainedModel):
        return _class_of(type(model).__name__, model.config), model.config
    config = model if isinstance(model, PreTrainedConfig) else read_config(model)
    if config.model_type not in registry.ARCHITECTURES and config.get_text_config() is not config:
        cls = AutoModelForCausalLM.class_for(config)  # of a multimodal model, the text model
        return cls, copy_config(cls, config_for(cls, config))
    names = config.architectures or [_likely_class(config)]
    cls = _class_of(names[0], config)
    return cls, copy_config(cls, config)


def read_config(source: str | Path) -> PreTrainedConfig:
    """Read a configuration from a directory, a ``config.json`` file or the hub."""
    path = Path(source)
    if (path / "adapter_config.json").is_file():
        base = read_raw(path / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(
            f"MODEL {source} holds an adapter, not a model: give its model, {base}, or a folder with the adapter "
            "merged into it (`merge_adapter: true` in a recipe, or merge_and_unload of peft)"
        )
    if path.is_dir():
        path = current_folder(path, "config.json")
    elif not path.exists() and (path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2):
        raise OSError(f"MODEL {source}: there is no such directory or file; give a directory or a name on the hub")
    try:
        kind = read_raw(path).get("model_type", "")
        if kind not in CONFIG_MAPPING:
            hint = registry.needed_release(kind) or f"model_type {kind!r} is unknown; `oslo-models list` shows all"
            raise ValueError(f"MODEL {source}: {hint}")
        return auto_config(path)
    except OSError as error:
        first = str(error).strip().partition("\n")[0]
        raise OSError(
            f"MODEL {source} is neither a directory with a config.json nor a model on the hub ({first}); check the name"
        ) from error


def _likely_class(config: PreTrainedConfig) -> str:
    kind = registry.SAME_CLASSES.get(config.model_type, config.model_type)
    if kind not in registry.ARCHITECTURES:
        near = registry.did_you_mean(kind, registry.ARCHITECTURES) or ";"
        raise ValueError(f"model_type {kind!r} has no class in oslo_models{near} `oslo-models list` shows all")
    known = list(registry.model_classes(kind))
    return next(name for head in HEADS for name in known if name.endswith(head))


def _class_of(name: str, config: PreTrainedConfig) -> Any:
    try:
        return registry.find(name)
    except AttributeError as error:
        kind = registry.SAME_CLASSES.get(config.model_type, config.model_type)
        raise ValueError(f"{name} ({kind}) cannot be planned: {error}") from error
