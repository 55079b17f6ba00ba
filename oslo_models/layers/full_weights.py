"""Code outside of a layer that reads the weight of the layer gets the full weight.

A derived plan replicates weights that the trial saw such code read. For code that the trial did not reach, reading
``layer.weight`` returns a `FullWeight` while the code of a model runs. The layer itself reads its shard.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from oslo_models.distributed.autograd_collectives import gather_from
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.plain_functions import PLAIN_FUNCTIONS
from oslo_models.sharding.layout import Layout

_thread = threading.local()


@contextmanager
def model_code(is_running: bool = True) -> Iterator[None]:
    """Within the block, this thread runs code of a model outside of its layers; with ``False``, code of a layer."""
    before = getattr(_thread, "is_running", False)
    _thread.is_running = is_running
    try:
        yield
    finally:
        _thread.is_running = before


def is_model_code() -> bool:
    """Return whether this thread runs code of a model outside of its layers. Compiled code reads shards."""
    return not torch.compiler.is_compiling() and getattr(_thread, "is_running", False)


def reads_shards(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the forward of a layer, which reads its own shards."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not is_model_code():
            return forward(*args, **kwargs)
        with model_code(False):
            return forward(*args, **kwargs)

    return wrapped


def as_model_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the forward of a model. Compiled code reads shards."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with model_code():
            return forward(*args, **kwargs)

    return wrapped


def full_weight(tp: Axis, param: Any, layout: Layout) -> Any:
    """Return a parameter of a layer as a `FullWeight` if it is a shard, and otherwise unchanged."""
    if layout.dim is None or tp.size == 1:
        return param
    with torch._C.DisableTorchFunctionSubclass():
        made: FullWeight = param.as_subclass(FullWeight)
        made.tp, made.weight_layout = tp, layout
    return made


class FullWeight(Tensor):
    """Local shard of a weight that behaves like the full weight. Functions that need values gather it.

    Attributes:
        tp: axis over which it is sharded.
        weight_layout: how it is sharded.
    """

    tp: Axis
    weight_layout: Layout

    def full(self) -> Tensor:
        """Gather the full weight on every rank. A collective. Its gradient is the gradient of the shard."""
        with torch._C.DisableTorchFunctionSubclass():
            local = self.as_subclass(Tensor)
        dim, ranges = self.weight_layout.dim, self.weight_layout.ranges
        assert dim is not None
        whole = gather_from(self.tp, local, dim, [sum(stop - start for start, stop in own) for own in ranges])
        held = [index for own in ranges for start, stop in own for index in range(start, stop)]
        if held == [*range(len(held))]:
            return whole
        return whole.index_select(dim, torch.tensor(held, device=whole.device).argsort())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, cls) and func in _OF_ANY_PART:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, cls) and func in _OF_SHAPES:
            return func(torch.empty(first.weight_layout.shape, device="meta"), *args[1:], **kwargs)
        given: list[tuple[Tensor, int]] = []

        def full(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            made = value.full()
            given.append((made, made._version))
            return made

        args, kwargs = tree_map(full, (args, kwargs))
        result = func(*args, **kwargs)
        if any(made._version != version for made, version in given):
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} changes a sharded weight in a part of the model that the trial of "
                "its plan did not reach: pass inputs= of a call that reaches it"
            )
        return result


_OF_ANY_PART = PLAIN_FUNCTIONS - {Tensor.is_contiguous}
_OF_SHAPES = {
    *(Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
    *(Tensor.shape.__get__, Tensor.is_contiguous),  # type: ignore[attr-defined]
}
