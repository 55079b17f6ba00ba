"""Selects blockwise attention in place of torch's attention while a model trains."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oslo_models.layers.blockwise_attention import BLOCKWISE, TORCH_ATTENTION
from oslo_models.modeling.original_class import original_class

_COMPARES = re.compile(r"""(?:[!=]=\s*|\[\s*|\bin\s*[(\[{][^)\]}]*)["']sdpa["']|["']sdpa["']\s*:""")
"""Code that treats torch's attention differently by its name."""


class AttentionChoice:
    """Selects `BLOCKWISE` in training mode, and torch's attention in evaluation mode.

    Parts with another attention implementation keep it, and so do parts for which `unavailable_reason` has a reason.
    """

    def __init__(self, model: Any) -> None:
        parts = _parts(model)
        without = {id(part.config) for part in parts if unavailable_reason(part) is not None}
        configs = {id(part.config): part.config for part in parts if part.config._attn_implementation == "sdpa"}
        self._configs = [config for key, config in configs.items() if key not in without]

    def select(self, training: bool) -> None:
        """Select the attention of the mode."""
        for config in self._configs:
            if config._attn_implementation in TORCH_ATTENTION:
                config._attn_implementation_internal = BLOCKWISE if training else "sdpa"


def check_attention_of_class(cls: type, config: Any) -> None:
    """Raise ``ValueError`` if `BLOCKWISE` was requested for a class that is known not to support it."""
    if config._attn_implementation == BLOCKWISE and (reason := _reason_of_class(original_class(cls))) is not None:
        raise ValueError(_not_available(reason))


def check_attention(model: nn.Module) -> None:
    """Raise ``ValueError`` if `BLOCKWISE` was requested for a part that does not support it."""
    for part in _parts(model):
        if part.config._attn_implementation == BLOCKWISE and (reason := unavailable_reason(part)) is not None:
            raise ValueError(_not_available(reason))


def unavailable_reason(part: PreTrainedModel) -> str | None:
    """Return why a model, or a part with its own configuration, does not support `BLOCKWISE`; ``None`` if it does."""
    cls = original_class(type(part))
    if (reason := _reason_of_class(cls)) is not None:
        return reason
    classes = {type(module) for module in part.modules()}
    modules = {base.__module__ for each in classes for base in each.__mro__}
    return _reason_of_modules(cls, modules)


def _reason_of_class(cls: Any) -> str | None:
    """Return the reason of a class of transformers, as far as it is known without a model."""
    if not cls._supports_sdpa:
        return f"{cls.__name__} does not use torch's attention"
    if not cls._can_set_attn_implementation():
        return f"{cls.__name__} does not look up its attention by name"
    return _reason_of_modules(cls, {cls.__module__})


def _reason_of_modules(cls: Any, modules: set[str]) -> str | None:
    for name in sorted(modules):
        if name.startswith("transformers.models.") and _compares_names(name):
            return f"{name.rpartition('.')[2]} of {cls.__name__} has code for the name 'sdpa'"
    return None


def _not_available(reason: str) -> str:
    remedy = "Leave the argument out, or pass 'sdpa' or 'eager'"
    return f"attn_implementation={BLOCKWISE!r} is not available: {reason}. {remedy}"


def _parts(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@cache
def _compares_names(module: str) -> bool:
    return _COMPARES.search(inspect.getsource(sys.modules[module])) is not None
