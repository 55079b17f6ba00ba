"""Configuration lists with one entry per layer, such as the types of the layers.

The forward of a pipeline stage reads the entries of its local blocks, and a copy of a model with fewer layers needs
shorter lists. A list is a layer list if its name mentions layers and its length is the number of layers. The name is
checked because an unrelated list may have the same length by chance.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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


def shorten(config: Any, depths: Collection[str], least: int) -> None:
    """Reduce a configuration to its first blocks, with at least one block of each kind.

    Args:
        depths: the attributes that may state a number of blocks.
        least: the smallest number of blocks.
    """
    counts = {name: count for name in depths if isinstance(count := getattr(config, name, None), int)}
    lists = {name: values for count in set(counts.values()) for name, values in layer_lists(config, count).items()}
    kinds = [list(values) for values in lists.values() if all(isinstance(each, str) for each in values)]
    blocks = max(least, 1 + max((values.index(kind) for values in kinds for kind in set(values)), default=0))
    for name in lists.keys() & vars(config).keys():
        setattr(config, name, list(lists[name][:blocks]))
    for name, count in counts.items():
        if count > blocks:
            setattr(config, name, blocks)


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
