"""SwiGLU, ``silu(gate) * up``, in one pass each way. Source: Shazeer, "GLU Variants Improve Transformer", 2020."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, rows_of, tl, wide
from oslo_kernels.operation import operation


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, computed at least in float32."""
    return (F.silu(gate.to(wide(gate.dtype))) * up).to(gate.dtype)


@operation("oslo::swiglu")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` of two tensors of one shape and dtype."""
    return reference(gate, up)


@operation("oslo::swiglu_backward")
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of ``gate`` and ``up``."""
    g, u, dy = (x.to(wide(gate.dtype)) for x in (gate, up, grad))
    s = g.sigmoid()
    return (dy * u * s * (1 + g * (1 - s))).to(gate.dtype), (dy * g * s).to(up.dtype)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


swiglu.register_autograd(lambda ctx, grad: swiglu_backward(grad, *ctx.saved_tensors), setup_context=_setup)


@jit
def swiglu_kernel(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + row * gate_stride + n, mask=n < N).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + n, mask=n < N).to(tl.float32)
    tl.store(out_ptr + row * N + n, g * tl.sigmoid(g) * u, mask=n < N)


@jit
def swiglu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, grad_stride, gate_stride, up_stride, N, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate_ptr + row * gate_stride + n, mask=n < N).to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + n, mask=n < N).to(tl.float32)
    dy = tl.load(grad_ptr + row * grad_stride + n, mask=n < N).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(grad_gate_ptr + row * N + n, dy * u * s * (1.0 + g * (1.0 - s)), mask=n < N)
    tl.store(grad_up_ptr + row * N + n, dy * g * s, mask=n < N)


@swiglu.register_kernel("cuda")
def swiglu_triton(gate: Tensor, up: Tensor) -> Tensor:
    if gate.dtype == torch.float64 or not gate.numel():
        return reference(gate, up)
    g, u, out = rows_of(gate), rows_of(up), torch.empty_like(gate, memory_format=torch.contiguous_format)
    rows, N = g.shape
    block = power_of_two(N, 1024)
    launch(swiglu_kernel, (rows, -(-N // block)), g, u, out, g.stride(0), u.stride(0), N, BLOCK=block)
    return out


@swiglu_backward.register_kernel("cuda")
def swiglu_backward_triton(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if gate.dtype == torch.float64 or not gate.numel():
        return swiglu_backward.plain(grad, gate, up)
    dy, g, u = rows_of(grad), rows_of(gate), rows_of(up)
    grad_gate, grad_up = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (gate, up))
    rows, N = g.shape
    block = power_of_two(N, 1024)
    sizes = (dy.stride(0), g.stride(0), u.stride(0), N)
    launch(swiglu_backward_kernel, (rows, -(-N // block)), dy, g, u, grad_gate, grad_up, *sizes, BLOCK=block)
    return grad_gate, grad_up
