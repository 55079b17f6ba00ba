"""Adapters that checkpoints carry for one kind of input, such as the LoRA adapter of Granite Speech for sounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import is_peft_available
from transformers.utils.hub import cached_file

from oslo_models.config.arguments import Arguments

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def find_own_adapter(config: Any, name: str | Path, arguments: Arguments, options: Mapping[str, Any]) -> str | None:
    """Return the folder with the adapter of a checkpoint, if it carries one.

    Args:
        options: of ``from_pretrained``, for downloads.

    Raises:
        ImportError: ``peft`` is not installed.
        ValueError: pipeline stages cannot switch the adapter.
    """
    if not getattr(config, "has_lora_adapter", False):
        return None
    given = {key: value for key, value in options.items() if key in HUB_OPTIONS}
    found = [cached_file(str(name), file, _raise_exceptions_for_missing_entries=False, **given) for file in _FILES]
    if found[0] is None:
        return None
    if not is_peft_available():
        raise ImportError(f"{name} has a LoRA adapter for sounds, which needs peft: pip install peft")
    if arguments.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline_parallel_size={arguments.pipeline_parallel_size}: {name} has a LoRA adapter, which is switched "
            "on for sounds, and only the first stage sees them; use tensor_parallel_size"
        )
    return str(Path(found[0]).parent)
