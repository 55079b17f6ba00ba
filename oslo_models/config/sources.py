"""Finds a checkpoint, in a directory or on the hub, and reads its configuration."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PreTrainedConfig

from oslo_models import checkpoint, registry

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
"""Arguments of transformers' ``from_pretrained`` that are passed on to the download."""
MOST_BYTES = 64 << 20
"""Limit for the size of a ``config.json``."""
_MODULES, MOST_MODULES = re.compile(r"(layer|block|expert|depth|codebook|stage)s?$"), 2**15
"""Names of numbers of modules, and their limit. transformers constructs modules one by one, before weights are read."""
_LABELS, MOST_LABELS = re.compile(r"labels$"), 1_000_000
"""The same for labels. transformers names each of them."""
_ATTENTION = "attn_implementation"
"""Key for the attention, by name or by part of the model."""


def open_source(cls: type[Any], name: str | Path, options: dict[str, Any]) -> tuple[Path, str | None, PreTrainedConfig]:
    """Find a checkpoint and read its configuration.

    Args:
        cls: the class of the model. Its ``config_class`` must match the checkpoint.
        name: a directory, or a name on the hub.
        options: keyword arguments of a constructor. Download arguments and attributes of the configuration are
            removed.

    Returns:
        The directory, the ``variant`` of its files, and the configuration.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: the checkpoint has another architecture.
    """
    hub = {key: options.pop(key) for key in HUB_ARGUMENTS if key in options}
    variant, subfolder = options.pop("variant", None), options.pop("subfolder", "")
    directory = find_checkpoint(name, variant, hub) / subfolder
    return directory, variant, read_config(cls, directory, options)


def find_checkpoint(name: str | Path, variant: str | None, hub: dict[str, Any]) -> Path:
    """Return the directory of a checkpoint: ``name`` itself, or its download from the hub.

    Args:
        name: a directory, or a name on the hub.
        variant: as transformers' ``variant``.
        hub: arguments of the download, by the names in `HUB_ARGUMENTS`.

    Raises:
        OSError: there is neither such a directory nor such a name on the hub.
    """
    directory = Path(name)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise OSError(f"{name} is a file; pass the directory that holds it, with its config.json")
    if directory.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1:
        raise OSError(f"there is no directory {name}")
    suffix = f".{variant}" if variant else ""
    weights = [f"model{suffix}*.safetensors*", f"pytorch_model{suffix}*.bin*"]
    for patterns in ([weights[0], "pytorch_model_tp*"], [weights[1]]):
        try:
            found = Path(snapshot_download(str(name), allow_patterns=["*.json", *patterns], **hub))
        except Exception as error:
            raise OSError(f"{name} is neither a directory nor a model on the hub: {error}") from error
        if any(any(found.glob(pattern)) for pattern in patterns):
            return found
    raise OSError(f"{name} on the hub holds no weights in a supported format (safetensors or .bin)")


def read_config(cls: type[Any], directory: Path, options: dict[str, Any]) -> PreTrainedConfig:
    """Read the configuration of a checkpoint.

    Args:
        cls: the class of the model.
        directory: the directory of the checkpoint.
        options: keyword arguments of a constructor. ``config`` replaces the saved configuration. Without
            ``config``, arguments override the saved attributes of the same name. Used arguments are removed.

    Raises:
        OSError: there is no ``config.json``.
        ValueError: it has another architecture.
    """
    config = options.pop("config", None)
    if config is not None:
        return copy_config(cls, config)
    folder = checkpoint.current_folder(directory, "config.json")
    if not (folder / "config.json").is_file():
        raise OSError(f"{directory} holds no config.json")
    raw = read_raw(folder)
    with checking(folder):
        wanted = cls.config_class.model_type
        # the class may be of a part of the model: CLIPTextModel of CLIP, a decoder of a model with images
        parts = [each for each in (raw, *raw.values()) if isinstance(each, dict) and each.get("model_type") == wanted]
        section = raw.get(cls.config_class.base_config_key) or next(iter(parts), raw)
        found = section.get("model_type", wanted)
        if wanted not in (found, registry.SAME_CLASSES.get(found)):
            saved = ", ".join(raw.get("architectures") or ["a class of its model type"])
            raise ValueError(f"{directory} is a {found} checkpoint and {cls.__name__} is for {wanted}; use {saved}")
        config_class = cls.config_class if found == wanted else CONFIG_MAPPING[found]
        config, unused = config_class.from_pretrained(folder, return_unused_kwargs=True, **options)
    options.clear()
    options.update(unused)
    return config


@contextmanager
def checking(source: str | Path) -> Iterator[None]:
    """Raise ``ValueError`` with the name of the checkpoint for configurations that transformers cannot use."""
    try:
        yield
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{source}: its configuration describes no model ({type(error).__name__}: {reason:.200}); download it again"
        ) from error


def read_raw(source: str | Path, **hub: Any) -> dict[str, Any]:
    """Return the content of a ``config.json`` after checks of what would take long, or run code.

    Args:
        source: a directory, the file itself, or a name on the hub.
        hub: arguments of the download.

    Raises:
        OSError: there is no such file, or it is not in JSON.
        ValueError: no model has such a configuration.
    """
    file = Path(source, hub.get("subfolder", ""))
    file = file / "config.json" if file.is_dir() else file
    if file.is_file() and (size := file.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{file}: it has {size} bytes, and configurations have at most {MOST_BYTES}")
    with checking(source):
        raw, _ = PreTrainedConfig.get_config_dict(str(source), **hub)
        names = raw.get("architectures") or []
        if not (isinstance(raw.get("model_type", ""), str) and isinstance(names, list) and all(map(_is_name, names))):
            raise ValueError(f"{source}: model_type and architectures in its config.json are no names")
        for key, value in _values("", raw):
            limit = MOST_MODULES if _MODULES.search(key) else MOST_LABELS if _LABELS.search(key) else None
            if limit is not None and isinstance(value, int) and value > limit:
                raise ValueError(f"{source}: {key}={value} in its config.json; the limit is {limit}")
            if key.endswith(_ATTENTION) and re.search("[/:]", str(value)):
                raise ValueError(
                    f"{source}: {key}={value!r:.80} in its config.json would download and run code; remove it, and "
                    "pass attn_implementation= if you trust the code"
                )
    return dict(raw)


def auto_config(source: str | Path, **options: Any) -> Any:
    """Call ``AutoConfig.from_pretrained`` after the checks of `read_raw`."""
    read_raw(source, **{key: options[key] for key in (*HUB_ARGUMENTS, "subfolder") if key in options})
    with checking(source):
        return AutoConfig.from_pretrained(str(source), **options)


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values in a configuration, and the lengths of its lists, with their keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _values(name if name.endswith(_ATTENTION) else str(key), item)
    elif isinstance(value, list):
        yield name, len(value)
        for item in value:
            yield from _values(name, item)
    else:
        yield name, value


def copy_config(cls: type[Any], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration. Raise ``ValueError`` if ``cls`` needs another configuration class."""
    same = registry.SAME_CLASSES.get(getattr(config, "model_type", ""))
    if not isinstance(config, cls.config_class) and same != cls.config_class.model_type:
        raise ValueError(f"config must be a {cls.config_class.__name__} for {cls.__name__}, got {config!r:.200}")
    return copy.deepcopy(config)


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """Read the ``generation_config.json`` of a checkpoint; ``None`` if the checkpoint has none."""
    folder = checkpoint.current_folder(directory, "generation_config.json")
    try:
        with checking(folder):
            return GenerationConfig.from_pretrained(folder)
    except OSError:
        return None
