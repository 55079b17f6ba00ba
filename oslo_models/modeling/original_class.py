"""The class of transformers' kind behind a parallel one."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def original_class(cls: type[Any]) -> Any:
    """The class of transformers' kind that a parallel class is made of: its first base that is not parallel."""
    return next(
        base
        for base in cls.__mro__
        if issubclass(base, PreTrainedModel)
        and not hasattr(base, "save_pretrained_with_parallel")
        and not base.__module__.startswith("oslo_models.")
    )
