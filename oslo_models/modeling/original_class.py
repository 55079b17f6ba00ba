"""Finds the transformers class of a parallel class."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def original_class(cls: type[Any]) -> Any:
    """Return the transformers class of a parallel class: its first base that is not parallel."""
    return next(
        base
        for base in cls.__mro__
        if issubclass(base, PreTrainedModel)
        and not hasattr(base, "save_pretrained_with_parallel")
        and not base.__module__.startswith("oslo_models.")
    )
