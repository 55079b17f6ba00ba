"""Name of the cache argument in transformers, which differs between releases and layers.

Up to 5.23, most forwards call it ``past_key_values``. From 5.24 on, they call it ``cache``. A few layers call it
``layer_past``, and state-space models up to 5.23 ``cache_params``. The name is read from the signature of transformers'
method. A method with another spelling raises, because an ignored cache changes the results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params", "layer_past")
"""Known names of the argument."""


def has_cache(arguments: Mapping[str, Any]) -> bool:
    """Return whether a call with these arguments asks for a cache, or continues one."""
    return bool(arguments.get("use_cache")) or any(arguments.get(name) is not None for name in NAMES)


def cache_name(method: Callable[..., Any]) -> str:
    """Return the name of the cache parameter of a transformers method.

    Raises:
        TypeError: the method has no cache parameter, or several.
    """
    found = [name for name in _parameters(method) if name in NAMES]
    if len(found) != 1:
        raise TypeError(
            f"{method.__qualname__} takes a cache by an unknown argument: exactly one of {', '.join(NAMES)} is "
            f"expected, its parameters are {', '.join(_parameters(method))}. Install a release of transformers that "
            "oslo_models supports, or call unfuse() if the model is fused"
        )
    return found[0]


@functools.cache
def generation_name() -> str:
    """Return the name that ``generate`` of the installed transformers uses for most models."""
    from transformers import GenerationMixin

    return cache_name(GenerationMixin.prepare_inputs_for_generation)


def name_in_model(forward: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """Return `cache_name` of a model's forward, or ``None`` for a model that keeps its state in another form.

    Raises:
        TypeError: the arguments contain a cache under a name that the forward does not have.
    """
    known = _parameters(forward)
    if not any(name in NAMES for name in known):
        # generate creates a cache for any model, and **kwargs may swallow it
        _refuse_caches(forward, {name: value for name, value in arguments.items() if name in known})
        return None
    name = cache_name(forward)
    _refuse_caches(forward, {other: value for other, value in arguments.items() if other != name})
    return name


def named_arguments(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a layer after its hidden states, each under its name in ``forward``."""
    names = [name for name in _parameters(forward) if name != "self"][1:]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def take_cache(forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Remove the cache from the keyword arguments of a layer and return it, or ``None``.

    Args:
        forward: transformers' forward of the layer.

    Raises:
        TypeError: the forward or the caller uses an unknown name for the argument.
    """
    name = cache_name(forward)
    found = arguments.pop(name, None)
    if name == "cache":  # transformers also accepts the former names
        for former in ("past_key_values", "cache_params"):
            given = arguments.pop(former, None)
            found = given if found is None else found
    _refuse_caches(forward, arguments)
    return found


def update_cache(cache: Any, key: Any, value: Any, layer: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """Append keys and values to one layer of a cache, like the attention layers of the installed transformers.

    Args:
        options: arguments of the attention function. From 5.24 on, a paged cache changes them.
    """
    given = {"kwargs": options} if generation_name() == "cache" else {}
    updated: tuple[Any, Any] = cache.update(key, value, layer, **given)
    return updated


def _refuse_caches(method: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if isinstance(value, _cache_class()):
            raise TypeError(
                f"{method.__qualname__} got a cache as {name}, which is not among its parameters "
                f"{', '.join(_parameters(method))}: pass it as one of them"
            )


@functools.cache
def _cache_class() -> type:
    from transformers.cache_utils import Cache

    return Cache


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    return _parameters_of(getattr(method, "__func__", method))


@functools.cache
def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
