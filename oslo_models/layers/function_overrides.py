"""Contexts that change how a module computes: replaced torch functions and replaced parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class FunctionOverrides(TorchFunctionMode):
    """Mode that replaces some torch functions.

    Args:
        overrides: for each replaced function, the replacement. It gets the same arguments.
    """

    def __init__(self, overrides: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._overrides = overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._overrides.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def override_attributes(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Override parameters, submodules and methods of a module by ``values`` of the same names within the block."""
    own = vars(module)
    before = {name: own[name] for name in values if name in own}  # overridden around this block, too
    own |= values
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own |= before
