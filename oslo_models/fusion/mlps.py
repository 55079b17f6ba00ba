"""MLPs of transformers that call `oslo_kernels.gated` and `oslo_kernels.gelu`.

Under ``torch.compile`` they run transformers' code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.gated import gated, gated_packed
from oslo_kernels.gelu import bias_gelu
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.linear import ColumnParallelConv1D, ColumnParallelLinear


class FusedGatedMLP(nn.Module):
    """The MLP of Llama, Gemma and their copies: activation and the product of gate and up projection in one pass.

    Attributes:
        gate_activation: one of `oslo_kernels.gated.ACTIVATIONS`.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    gate_activation: str

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.gate_activation))


class FusedPackedMLP(nn.Module):
    """The MLP of Phi-3 and of its copies, `FusedGatedMLP` with one projection to gate and up."""

    gate_up_proj: nn.Module
    down_proj: nn.Module
    gate_activation: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(hidden_states)
        return self.down_proj(gated_packed(self.gate_up_proj(hidden_states), self.gate_activation))


class FusedGELUMLP(nn.Module):
    """An MLP of a linear layer, a GeLU and further layers: bias and GeLU in one pass or in the product's epilogue.

    Attributes:
        parts: the names of the linear layer, of the activation, and of the layers that follow.
        approximate: the argument of ``F.gelu``.
    """

    parts: tuple[str, ...]
    approximate: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        first, _, *rest = (getattr(self, name) for name in self.parts)
        if torch.compiler.is_compiling() or not _is_plain(first):  # changed by LoRA, FSDP or a hook
            return super().forward(hidden_states)
        with without_override():
            x = _gelu_of_linear(first, hidden_states, self.approximate)
        for layer in rest:
            x = layer(x)
        return x


def _is_plain(layer: nn.Module) -> bool:
    hooked = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks
    plain = type(layer) in (nn.Linear, Conv1D, ColumnParallelLinear, ColumnParallelConv1D)
    return plain and not hooked and layer.bias is not None


def _gelu_of_linear(layer: Any, x: Tensor, approximate: str) -> Tensor:
    weight_io = layer.weight if isinstance(layer, Conv1D) else layer.weight.T
    is_sharded = isinstance(layer, (ColumnParallelLinear, ColumnParallelConv1D))
    if is_sharded and torch.is_grad_enabled():
        return bias_gelu(layer.entered_product(x, None), layer.bias, approximate)
    x = layer.enter_region(x) if is_sharded else x
    same_dtype = x.dtype == layer.weight.dtype == layer.bias.dtype and x.dtype in (torch.float16, torch.bfloat16)
    casts = torch.is_autocast_enabled(x.device.type)  # autocast handles F.linear, but not this operation
    if x.is_cuda and approximate == "tanh" and same_dtype and not casts and not torch.is_grad_enabled():
        # The epilogue of cuBLASLt's product has the tanh form only, and approximates it to about 5e-6: too coarse for
        # float32.
        out = torch._addmm_activation(layer.bias, x.reshape(-1, x.shape[-1]), weight_io, use_gelu=True)
        return out.view(*x.shape[:-1], -1)
    return bias_gelu(x @ weight_io, layer.bias, approximate)
