"""Configuration lists with one entry per layer, such as the types of the layers.

The forward of a pipeline stage reads the entries of its local blocks, and a copy of a model with fewer layers needs
shorter lists. A list is a layer list if its name mentions layers and its length is the number of layers. The name is
checked because an unrelated list may have the same length by chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

_NAME = re.compile(r"(^|_)(layers?|blocks?)(_|$)|_(types|modes)$")


def is_layer_list(name: str) -> bool:
    """Return whether a list of this name has one entry per layer, provided that its length is the number of layers."""
    return _NAME.search(name) is not None


def layer_lists(config: Any, count: int) -> dict[str, Sequence[Any]]:
    """Return the layer lists of a configuration with ``count`` layers, by name."""
    kind: Any = type(config)
    names = [name for name in vars(config) if is_layer_list(name)]
    values = {name: getattr(config, name, None) for name in (*names, *_computed_lists(kind))}
    return {name: value for name, value in values.items() if isinstance(value, (list, tuple)) and len(value) == count}


@cache
def _computed_lists(kind: type) -> tuple[str, ...]:
    """Return the names of properties that may compute layer lists."""
    found = {name for base in kind.__mro__ for name, value in vars(base).items() if isinstance(value, property)}
    return tuple(sorted(name for name in found if is_layer_list(name) and name != "per_layer_config"))


@contextmanager
def replaced_values(config: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Override attributes and properties of a configuration within the block, without validation."""
    attributes = vars(config)
    kind: Any = type(config)
    before = {name: attributes[name] for name in values if name in attributes}
    computed = {name: value for name, value in values.items() if name not in attributes}
    attributes.update({name: values[name] for name in before})
    if computed:
        config.__class__ = _with_values(kind, tuple(computed), tuple(map(tuple, computed.values())))
    try:
        yield
    finally:
        if computed:
            config.__class__ = kind
        attributes.update(before)


@cache
def _with_values(kind: type, names: tuple[str, ...], values: tuple[Any, ...]) -> type:
    """Return a subclass of ``kind`` with fixed values in place of properties."""
    lists = {name: list(value) for name, value in zip(names, values, strict=True)}
    return type(kind.__name__, (kind,), {**lists, "__module__": kind.__module__})
