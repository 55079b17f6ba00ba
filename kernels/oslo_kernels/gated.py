"""Gated activations, ``activation(gate) * up``, in one pass each way: SwiGLU, GeGLU.

Source: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels.gelu import gelu_slope, gelu_value
from oslo_kernels.language import jit, launch, power_of_two, rows_of, tl, wide
from oslo_kernels.operation import operation

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The names of the activations. Kernels identify them by index."""


def reference(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """`gated` in plain torch."""
    g = gate.to(wide(gate.dtype))
    g = F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (g * up).to(gate.dtype)


@operation("oslo::gated", "*s n", "*s n")
def gated(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Compute ``activation(gate) * up`` of two tensors of one shape and dtype, at least in float32.

    Args:
        activation: one of `ACTIVATIONS`.
    """
    return reference(gate, up, activation)


@operation("oslo::gated_backward", "*s n", "*s n", "*s n")
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``gate`` and ``up``."""
    g, u, dy = (x.to(wide(gate.dtype)) for x in (gate, up, grad))
    if activation == "silu":
        of_gate, value = torch.ops.aten.silu_backward(dy * u, g), F.silu(g)
    else:
        form = "tanh" if activation == "gelu_tanh" else "none"
        of_gate, value = torch.ops.aten.gelu_backward(dy * u, g, approximate=form), F.gelu(g, approximate=form)
    return of_gate.to(gate.dtype), (dy * value).to(up.dtype)


@operation("oslo::gated_packed", "*s 2*n")
def gated_packed(packed: Tensor, activation: str = "silu") -> Tensor:
    """`gated` of a tensor ``[..., 2 * N]`` with the gate in its first half. The gradient is one tensor, too."""
    gate, up = packed.chunk(2, -1)
    return reference(gate, up, activation)


@operation("oslo::gated_packed_backward", "*s n", "*s 2*n")
def gated_packed_backward(grad: Tensor, packed: Tensor, activation: str = "silu") -> Tensor:
    """Compute the gradient of ``packed``."""
    return torch.cat(gated_backward.plain(grad, *packed.chunk(2, -1), activation), -1)


@gated.register_fake
def _(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    return torch.empty_like(gate)


@gated_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


@gated_packed.register_fake
def _(packed: Tensor, activation: str = "silu") -> Tensor:
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))


@gated_packed_backward.register_fake
def _(grad: Tensor, packed: Tensor, activation: str = "silu") -> Tensor:
    return torch.empty_like(packed)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *gated_backward(grad, *ctx.saved_tensors, ctx.activation), None


def _packed_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return gated_packed_backward(grad, *ctx.saved_tensors, ctx.activation), None


gated.register_autograd(_backward, setup_context=_setup)
gated_packed.register_autograd(_packed_backward, setup_context=_setup)


@jit
def gated_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, N, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + row * gate_stride + n, mask=n < N).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + n, mask=n < N).to(tl.float32)
    value = g * tl.sigmoid(g) if KIND == 0 else gelu_value(g, KIND == 2)
    tl.store(out_ptr + row * N + n, value * u, mask=n < N)


@jit
def gated_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, grad_stride, gate_stride, up_stride, out_stride, N,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + row * gate_stride + n, mask=n < N).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + n, mask=n < N).to(tl.float32)
    dy = tl.load(grad_ptr + row * grad_stride + n, mask=n < N).to(tl.float32)
    if KIND == 0:
        s = tl.sigmoid(g)
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    else:
        value = gelu_value(g, KIND == 2)
        slope = gelu_slope(g, KIND == 2)
    tl.store(grad_gate_ptr + row * out_stride + n, dy * u * slope, mask=n < N)
    tl.store(grad_up_ptr + row * out_stride + n, dy * value, mask=n < N)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], strides: tuple[int, ...], activation: str) -> None:
    rows, N = tensors[0].shape
    block = power_of_two(N, 1024)
    flags = {"KIND": ACTIVATIONS.index(activation), "BLOCK": block}
    launch(kernel, (rows, -(-N // block)), *tensors, *strides, N, **flags)


@gated.register_kernel("cuda")
def gated_triton(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    if gate.dtype == torch.float64 or not gate.numel():
        return reference(gate, up, activation)
    g, u, out = rows_of(gate), rows_of(up), torch.empty_like(gate, memory_format=torch.contiguous_format)
    _launch(gated_kernel, (g, u, out), (g.stride(0), u.stride(0)), activation)
    return out


@gated_backward.register_kernel("cuda")
def gated_backward_triton(grad: Tensor, gate: Tensor, up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    if gate.dtype == torch.float64 or not gate.numel():
        return gated_backward.plain(grad, gate, up, activation)
    dy, g, u = rows_of(grad), rows_of(gate), rows_of(up)
    grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
    strides = (dy.stride(0), g.stride(0), u.stride(0), g.shape[1])
    _launch(gated_backward_kernel, (dy, g, u, grad_gate, grad_up), strides, activation)
    return grad_gate, grad_up


@gated_packed.register_kernel("cuda")
def gated_packed_triton(packed: Tensor, activation: str = "silu") -> Tensor:
    return gated_triton(*packed.chunk(2, -1), activation)


@gated_packed_backward.register_kernel("cuda")
def gated_packed_backward_triton(grad: Tensor, packed: Tensor, activation: str = "silu") -> Tensor:
    if packed.dtype == torch.float64 or not packed.numel():
        return gated_packed_backward.plain(grad, packed, activation)
    made = torch.empty_like(packed, memory_format=torch.contiguous_format)
    dy, (g, u) = rows_of(grad), rows_of(packed).chunk(2, -1)
    strides = (dy.stride(0), g.stride(0), u.stride(0), packed.shape[-1])
    _launch(gated_backward_kernel, (dy, g, u, *rows_of(made).chunk(2, -1)), strides, activation)
    return made
