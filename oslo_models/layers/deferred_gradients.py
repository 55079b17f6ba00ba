"""Weight gradients of linear layers that are computed later than the gradients of their inputs.

The backward pass of a linear layer has two independent products. The previous layers wait for the gradient of the
input. Only the optimizer waits for the gradient of the weight, so a pipeline stage may compute it when it would
otherwise be idle. Until then, a layer keeps its input and the gradient of its output.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import plain_conv1d, product_by, trained_product
from oslo_models.distributed.collectives import has_dispatch_mode
from oslo_models.distributed.sharded_tensor import without_override

_DEFERS: ContextVar[bool] = ContextVar("defers weight gradients", default=False)


def defers_weight_gradients() -> bool:
    """Return whether the current forward pass defers weight gradients."""
    return _DEFERS.get()


def deferrable_weights(blocks: Iterable[nn.Module], modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the trained weights of linear layers in ``blocks`` that a `DeferredGradients` accepts.

    A weight of several modules is left out, since autograd sums its gradients before it accumulates them. So is a
    weight with hooks, which expect its gradient in the backward pass.

    Args:
        modules: all modules of the model.
    """
    holders = Counter(id(param) for module in modules for param in module._parameters.values())
    linear = (each for block in blocks for each in block.modules() if isinstance(each, (nn.Linear, Conv1D)))
    weights = (layer._parameters.get("weight") for layer in linear)
    return [weight for weight in weights if weight is not None and holders[id(weight)] == 1 and _is_plain(weight)]


def _is_plain(weight: nn.Parameter) -> bool:
    if type(weight) is not nn.Parameter and not getattr(type(weight), "has_plain_storage", False):
        return False
    with without_override():
        is_matrix = weight.dim() == 2 and weight.numel() > 0 and weight.is_contiguous()
        has_hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
        return is_matrix and weight.requires_grad and weight.is_leaf and not has_hooks


class _Product(NamedTuple):
    """Product whose weight gradient is due.

    Attributes:
        weight: parameter of the layer.
        grad: gradient of the output, ``[rows, out]``, in the dtype of the computation.
        x: input, ``[rows, in]``.
        is_io: whether the weight is ``[in, out]``.
        way: implementation of the products (`oslo_kernels.linear.MANY`). ``None`` for torch's.
        versions: versions of ``grad`` and ``x``.
    """

    weight: nn.Parameter
    grad: Tensor
    x: Tensor
    is_io: bool
    way: str | None
    versions: tuple[int, int]

    def weight_gradient(self) -> Tensor:
        """Compute the gradient like autograd, bit for bit."""
        if (self.grad._version, self.x._version) != self.versions:
            raise RuntimeError(
                'schedule="zb-h1": the input of a linear layer, or the gradient of its output, was modified in place '
                f'before the gradient of its weight {tuple(self.weight.shape)} was computed; use schedule="1f1b"'
            )
        left, right = (self.x, self.grad) if self.is_io else (self.grad, self.x)
        return _multiply(self.way, left.t(), right.t())


def _multiply(way: str | None, left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right.T`` of two matrices."""
    return left.mm(right.t()) if way is None else product_by(way, left, right)


class MicroBatchGradients:
    """Weight gradients of one micro-batch, in the order of its backward pass.

    Attributes:
        deferred: weights with deferred gradients, by ``id``.
        others: weights with other uses, by ``id``. The backward pass accumulates the gradients of these uses itself.
    """

    def __init__(self) -> None:
        self._products: deque[_Product] = deque()
        self.deferred: set[int] = set()
        self.others: set[int] = set()

    def add(self, weight: nn.Parameter, grad: Tensor, x: Tensor, is_io: bool, way: str | None) -> None:
        """Add a product of ``x``, ``[rows, in]``, with ``grad``, the gradient of its output, ``[rows, out]``."""
        self._products.append(_Product(weight, grad, x, is_io, way, (grad._version, x._version)))

    def compute(self, accumulate: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Compute the gradients, pass each to ``accumulate``, and free its tensors.

        Gradients of a weight that several products read are summed first, as autograd sums them.
        """
        uses = Counter(id(product.weight) for product in self._products)
        sums: dict[int, Tensor] = {}
        while self._products:
            product = self._products.popleft()
            weight, grad = product.weight, product.weight_gradient()
            del product
            if id(weight) in sums:
                grad = sums.pop(id(weight)) + grad
            uses[id(weight)] -= 1
            if uses[id(weight)]:
                sums[id(weight)] = grad
            else:
                accumulate(weight, grad.to(weight.dtype))


class DeferredGradients:
    """Weight gradients that a pipeline stage defers in one loop over micro-batches.

    Args:
        weights: see `deferrable_weights`.
        accumulate: adds a gradient to a parameter, ``(micro_batch, parameter, gradient)``.
    """

    def __init__(
        self, weights: Iterable[nn.Parameter], accumulate: Callable[[int, nn.Parameter, Tensor], None]
    ) -> None:
        with without_override():
            self._values = {id(weight): (weight, Tensor.detach(weight)) for weight in weights}
        self._casts: dict[tuple[int, torch.dtype], Tensor] = {}
        self._accumulate = accumulate
        self._with_other_uses: set[int] = set()
        self._recorded: dict[int, MicroBatchGradients] = {}
        self._due: deque[tuple[int, MicroBatchGradients]] = deque()

    def __len__(self) -> int:
        """Return the number of micro-batches with gradients that are due."""
        return len(self._due)

    def recording(self, i: int) -> TorchFunctionMode:
        """Return the mode for the forward pass of micro-batch ``i``."""
        self._recorded[i] = MicroBatchGradients()
        return _Recording(self, self._recorded[i])

    def before_backward(self, i: int, accumulated: Iterable[Tensor] = ()) -> None:
        """Compute the gradients that are due if the backward pass of micro-batch ``i`` has to follow them.

        Args:
            accumulated: parameters that this backward pass accumulates last, as far as they are known.

        Raises:
            RuntimeError: this backward pass would accumulate a deferred gradient and another one of the same weight.
        """
        current, last = self._recorded[i], set(map(id, accumulated))
        if both := last & current.deferred:
            weight, _ = self._values[both.pop()]
            raise RuntimeError(
                f'schedule="zb-h1": a weight of shape {tuple(weight.shape)} has another use than in its linear layer, '
                'so its gradient would be reduced over the replicas before it is complete; use schedule="1f1b"'
            )
        if (last | current.others) & {key for _, gradients in self._due for key in gradients.deferred}:
            self.compute()

    def after_backward(self, i: int) -> None:
        """Note that the gradients of micro-batch ``i`` are due."""
        self._due.append((i, self._recorded.pop(i)))

    @torch.no_grad()
    def compute(self, keep: int = 0) -> None:
        """Compute and accumulate the gradients of all micro-batches except the last ``keep``, oldest first."""
        while len(self._due) > keep:
            i, gradients = self._due[0]
            gradients.compute(partial(self._accumulate, i))
            self._due.popleft()  # afterwards, so that the gradients still count as due if this raises

    def clear(self) -> None:
        """Drop all gradients."""
        self._recorded.clear()
        self._due.clear()
        self._casts.clear()

    def value_of(self, weight: Any) -> tuple[nn.Parameter, Tensor] | None:
        """Return the parameter and its values without a graph, if its gradient can be deferred."""
        return None if id(weight) in self._with_other_uses else self._values.get(id(weight))

    def cast(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return the values of a weight in the dtype of autocast. They are the same in the whole loop."""
        key = id(weight), dtype
        if key not in self._casts:
            self._casts[key] = self._values[id(weight)][1].to(dtype)
        return self._casts[key]

    def note_other_use(self, args: Iterable[Any], gradients: MicroBatchGradients) -> None:
        """Stop deferring the gradients of the weights among ``args``."""
        found = self._values.keys() & set(map(id, args))
        self._with_other_uses |= found
        gradients.others |= found

    def are_among(self, args: Iterable[Any]) -> bool:
        """Return whether one of the weights is among ``args``."""
        return not self._values.keys().isdisjoint(map(id, args))


class _Recording(TorchFunctionMode):
    """Mode that computes linear layers by `_DeferredProduct` in the forward pass of a micro-batch."""

    def __init__(self, deferred: DeferredGradients, gradients: MicroBatchGradients) -> None:
        super().__init__()
        self._deferred, self._gradients = deferred, gradients
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        self._token: Token[bool] | None = None

    def __enter__(self) -> Any:
        self._token = _DEFERS.set(True)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        assert self._token is not None
        _DEFERS.reset(self._token)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in _OPERANDS and len(args) > 1 and kwargs.keys() <= {"bias"}:
            x, weight, bias, is_io, way = _OPERANDS[func](*args, **kwargs)
            value = self._deferred.value_of(weight)
            if value is not None and _is_deferrable(x, value[1], bias):
                return self._product(x, *value, bias, is_io, way)
        result = func(*args, **kwargs)
        given = (*args, *kwargs.values())
        if given and isinstance(given[0], (list, tuple)):
            given += tuple(given[0])
        if self._deferred.are_among(given) and _has_graph(result) and not any(result is arg for arg in given):
            self._deferred.note_other_use(given[:1] if func in _CONVERSIONS else given, self._gradients)
        return result

    def _product(
        self, x: Tensor, weight: nn.Parameter, value: Tensor, bias: Any, is_io: bool, way: str | None
    ) -> Tensor:
        self._gradients.deferred.add(id(weight))
        if _is_cast(x):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, value = self._cast(x, dtype), self._deferred.cast(weight, dtype)
            bias = None if bias is None else bias.to(dtype)
        return _DeferredProduct.apply(x, value, bias, is_io, way, partial(self._gradients.add, weight))

    def _cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast an activation like autocast, which casts a leaf once and so sums its gradients in ``dtype``."""
        if not x.is_leaf or x.dtype == dtype:
            return x.to(dtype)
        if id(x) not in self._casts:
            self._casts[id(x)] = x, x.to(dtype)
        return self._casts[id(x)][1]


_Operands = tuple[Any, Any, Any, bool, str | None]


def _linear_operands(x: Any, weight: Any, bias: Any = None) -> _Operands:
    return x, weight, bias, False, None


def _addmm_operands(bias: Any, x: Any, weight: Any) -> _Operands:
    return x, weight, bias, True, None


def _matmul_operands(x: Any, weight: Any) -> _Operands:
    return x, weight, None, True, None


def _operands(*args: Any) -> _Operands:
    return args


_OPERANDS: Mapping[Any, Callable[..., _Operands]] = {
    F.linear: _linear_operands,
    torch.addmm: _addmm_operands,
    torch.matmul: _matmul_operands,
    Tensor.matmul: _matmul_operands,
    Tensor.__matmul__: _matmul_operands,
    trained_product: _operands,
}
"""By product: its arguments as ``(x, weight, bias, whether the weight is [in, out], implementation)``."""
_CONVERSIONS = {Tensor.to, Tensor.type_as}
"""Functions with a graph of their first argument only."""


def _has_graph(result: Any) -> bool:
    found = result[0] if isinstance(result, (list, tuple)) and result else result
    return isinstance(found, Tensor) and found.requires_grad


def _is_cast(x: Tensor) -> bool:
    """Return whether autocast is on. It does not know meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _is_deferrable(x: Any, weight: Tensor, bias: Any) -> bool:
    """Return whether `_DeferredProduct` computes this product and its gradients like torch, bit for bit."""
    if type(x) is not Tensor or not x.requires_grad or not torch.is_grad_enabled() or x.layout is not torch.strided:
        return False
    if x.dim() < 2 or (x.dim() == 2 and x.stride(1) != 1) or (bias is not None and bias.dim() != 1):
        return False
    if has_dispatch_mode() and not x.is_meta:  # meta tensors have no bits, and a plan counts their memory
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False  # checkpointed code is computed again without this mode
    if _is_cast(x):
        return torch.float64 not in (x.dtype, weight.dtype)
    return x.dtype == weight.dtype


class _DeferredProduct(torch.autograd.Function):
    """Product of a linear layer. Its backward pass passes the factors of the weight gradient to ``defer``.

    The parameter is not an input of this function, so that autograd accumulates nothing for it in this pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor,
        bias: Tensor | None,
        is_io: bool,
        way: str | None,
        defer: Callable[[Tensor, Tensor, bool, str | None], None],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, value)
        ctx.is_io, ctx.way, ctx.defer = is_io, way, defer
        if way is None:
            out: Tensor = (plain_conv1d if is_io else F.linear)(x, value, bias)
        else:
            out = product_by(way, x, value.t() if is_io else value, bias)
        # no autograd view: the all-reduce over ranks changes the output in place
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        x, value = ctx.saved_tensors
        grad_ro, x_ri = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.defer(grad_ro, x_ri, ctx.is_io, ctx.way)
        of_x = _multiply(ctx.way, grad_ro, value if ctx.is_io else value.t()).view(x.shape)
        return of_x, None, grad_ro.sum(0) if ctx.needs_input_grad[2] else None, None, None, None
