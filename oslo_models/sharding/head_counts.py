"""The numbers of heads that a configuration states, for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def attribute_of_heads(config: Any, count: int) -> str:
    """Return the attribute by which a configuration states this number of heads, or "" if it states another one.

    Attributes of query heads come first. An entry of a list and a configuration inside of another are named too, as in
    ``"num_attention_heads_per_layer[1]"`` and ``"text_config.num_attention_heads"``.
    """
    names = [name for name, value in _head_counts(config) if value == count]
    return min(names, key=_rank, default="")


def _rank(name: str) -> tuple[int, bool, bool, str]:
    leaf = name.rpartition(".")[2]
    return name.count("."), leaf != "num_attention_heads", "attention_heads" not in leaf, name


def _head_counts(config: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """The numbers of heads in a configuration, in its lists, in its layers, and in configurations inside of it."""
    for name in sorted(vars(config).keys() | getattr(config, "attribute_map", {}).keys()):
        if name.startswith("_"):
            continue
        for path, value in _values(config, name):
            if hasattr(value, "to_dict"):
                yield from _head_counts(value, f"{prefix}{path}.")
            elif name.endswith(("heads", "head", "heads_per_layer")) and isinstance(value, int):
                yield prefix + path, value


def _values(config: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The values of an attribute, which may be a list or differ from layer to layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read it from the configuration of all layers
        for layer, own in enumerate(config.per_layer_config):
            yield f"per_layer_config[{layer}].{name}", getattr(own, name)
        return
    if isinstance(value, (list, tuple)):
        yield from ((f"{name}[{place}]", each) for place, each in enumerate(value))
    else:
        yield name, value
