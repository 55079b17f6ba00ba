"""Loads the full model that drafts tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oslo_models import registry
from oslo_models.checkpoint import current_folder
from oslo_models.config.sources import auto_config


def load_draft_model(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load a full model that drafts tokens.

    Args:
        name: directory, or name on the hub.
    """
    cls: Any = registry.find(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[read_draft_config(name).model_type])
    return cls.from_pretrained(name, dtype=dtype).eval().to(device)


def read_draft_config(name: str) -> Any:
    """Read the configuration of a model that drafts tokens.

    Raises:
        OSError: there is no such model. The message names the argument.
        ValueError: the configuration is invalid.
    """
    try:
        return auto_config(current_folder(name, "config.json") if Path(name).is_dir() else name)
    except OSError as error:
        raise OSError(
            f"speculative_model={name!r} cannot be read; pass a folder or a name on the hub: {error}"
        ) from error
