"""Attention layers of transformers whose forward calls fused functions instead of its module's own.

The layers call ``apply_rotary_pos_emb`` and ``eager_attention_forward`` as globals of their module. Replacing those
would change every model of the process, so a layer gets a class whose forward has globals of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn

from oslo_models.fusion import apex, known_layers, modules


class _Replacement:
    """A function that attention layers call, and what it becomes.

    Attributes:
        callers: the layers that call it, as `known_layers` names them.
        title: what the report calls it.
        by_backend: for each backend, what makes the fused function from the layer's own.
    """

    def __init__(self, callers: frozenset[str], title: str, **by_backend: Callable[[Any], Callable[..., Any]]) -> None:
        self.callers, self.title, self.by_backend = callers, title, by_backend


_REPLACEMENTS = {
    "apply_rotary_pos_emb": _Replacement(known_layers.CALL_ROTARY, "rotary positions", triton=modules.fused_rotary),
    "eager_attention_forward": _Replacement(
        known_layers.CALL_EAGER_ATTENTION,
        "softmax of weights that are made",
        triton=modules.fused_eager_attention,
        apex=apex.apex_eager_attention,
    ),
}


def replaceable(layer: str, backend: str) -> tuple[str, ...]:
    """The functions called by a layer, named as in `known_layers`, that ``backend`` has a fused form of."""
    return tuple(name for name, each in _REPLACEMENTS.items() if layer in each.callers and backend in each.by_backend)


def titles(functions: tuple[str, ...]) -> str:
    """What the report calls these functions."""
    return " and ".join(_REPLACEMENTS[name].title for name in functions)


@cache
def with_fused_functions(cls: Any, functions: tuple[str, ...], backend: str) -> type:
    """A subclass of ``cls`` whose forward, transformers' own code, calls the fused form of ``functions``.

    Under `torch.compile`, which would look the names up in transformers' module anyway, the forward is the plain one.
    """
    plain = cls.forward
    fused = {name: _REPLACEMENTS[name].by_backend[backend](plain.__globals__[name]) for name in functions}
    rebound = FunctionType(
        plain.__code__, {**plain.__globals__, **fused}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    rebound.__kwdefaults__ = plain.__kwdefaults__

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (plain if torch.compiler.is_compiling() else rebound)(self, *args, **kwargs)

    return type(f"Fused{cls.__name__}", (cls,), {"__module__": __name__, "forward": forward})
