"""Head counts in a configuration, for error messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def attribute_of_heads(config: Any, count: int) -> str:
    """Return the configuration attribute that equals this number of heads, or "" if there is none.

    Attributes of query heads come first. Names include list indices and nested configurations, as in
    ``"num_attention_heads_per_layer[1]"`` and ``"text_config.num_attention_heads"``.
    """
    names = [name for name, value in _head_counts(config) if value == count]
    return min(names, key=_rank, default="")


def _rank(name: str) -> tuple[int, bool, bool, str]:
    leaf = name.rpartition(".")[2]
    return name.count("."), leaf != "num_attention_heads", "attention_heads" not in leaf, name


def _head_counts(config: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the head counts in a configuration, in its lists, in its layers, and in nested configurations."""
    for name in sorted(vars(config).keys() | getattr(config, "attribute_map", {}).keys()):
        if name.startswith("_"):
            continue
        for path, value in _values(config, name):
            if hasattr(value, "to_dict"):
                yield from _head_counts(value, f"{prefix}{path}.")
            elif name.endswith(("heads", "head", "heads_per_layer")) and isinstance(value, int):
                yield prefix + path, value


def _values(config: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of an attribute, which may be a list or differ from layer to layer."""
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
