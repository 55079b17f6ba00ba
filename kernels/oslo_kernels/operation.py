"""`operation`: an operation of torch that eager code calls without torch's dispatcher.

The dispatcher and its Python layers take some 100 microseconds of the host per call, more than most kernels take of a
GPU. Only code that intercepts operations needs them: `torch.compile`, fake tensors, selective checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from oslo_kernels.shapes import Shapes

__all__ = ["Operation", "is_plain", "operation"]


class Operation:
    """A ``torch.library.custom_op`` that calls its kernel directly when no tracer or dispatch mode is active.

    Args:
        shapes: the required shapes of its tensors, see `Shapes`. Kernels of other devices than the CPU check them.

    Attributes:
        op: the custom operation.
        plain: its implementation in plain torch.
    """

    def __init__(self, name: str, plain: Callable[..., Any], *shapes: str) -> None:
        self.op = torch.library.custom_op(name, plain, mutates_args=())
        self.plain, self.shapes = plain, Shapes(name, *shapes)
        self.__doc__, self.__name__, self.__module__ = plain.__doc__, plain.__name__, plain.__module__
        self._kernels: dict[str, Callable[..., Any]] = {"cpu": plain}
        self._function: Any = None
        parameters = signature(plain).parameters
        self._names, self._defaults = tuple(parameters), tuple(each.default for each in parameters.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self.op(*args, **kwargs)
        args = (*args, *self._defaults[len(args) :])
        tensors = [x for x in args if isinstance(x, Tensor)]
        kernel = self._kernels.get(tensors[0].device.type)
        if kernel is None or torch._C._are_functorch_transforms_active() or not all(map(is_plain, tensors)):
            return self.op(*args)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            # double backward: an operation without an autograd formula leaves the error to torch
            return self.op(*args) if self._function is None else self._function.apply(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return kernel(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Register the shapes and dtypes of the results for ``torch.compile``."""
        self.op.register_fake(fake)
        return fake

    def register_kernel(self, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the implementation for a type of device. Calls of the operation check its tensors first."""

        def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(kernel)
            def checked(*args: Any, **kwargs: Any) -> Any:
                missing = tuple(kwargs.get(name) for name in self._names[len(args) :]) if kwargs else ()
                self.shapes.check((*args, *missing))
                return kernel(*args, **kwargs)

            self._kernels[device] = checked
            self.op.register_kernel(device)(checked)
            return kernel

        return register

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Register the backward pass, with the arguments of ``torch.library.register_autograd``."""
        self.op.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *args: Any) -> Any:
            kernel = self._kernels[next(x for x in args if isinstance(x, Tensor)).device.type]
            with torch._C.DisableTorchFunctionSubclass():
                output = kernel(*args)
            setup_context(ctx, args, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(f"_{self.__name__}", (torch.autograd.Function,), methods)


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor's storage holds its values. Subclasses with ``__torch_dispatch__`` need not have one."""
    kind = type(x)
    return kind is Tensor or kind is nn.Parameter or bool(getattr(kind, "has_plain_storage", False))


def operation(name: str, *shapes: str) -> Callable[[Callable[..., Any]], Operation]:
    """Make an `Operation` of its implementation in plain torch, as ``torch.library.custom_op`` does."""
    return lambda plain: Operation(name, plain, *shapes)
