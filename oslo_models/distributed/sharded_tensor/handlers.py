"""Tables of functions of torch, with the functions that handle them for shards and their views."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_models.distributed.shard_functions import ELEMENTWISE, LISTS_ELEMENTWISE, RESHAPED
from oslo_models.distributed.sharded_tensor import operations, reductions
from oslo_models.distributed.sharded_tensor.tensors import HANDLERS, VIEW_HANDLERS, on_local

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm)
_DRAWS = (
    *(torch.rand_like, torch.randn_like, torch.randint_like, Tensor.uniform_, Tensor.normal_, Tensor.random_),
    *(Tensor.exponential_, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_, Tensor.bernoulli_),
    *(nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
)
_SUMS = (torch.sum, Tensor.sum, torch.mean, Tensor.mean)
_EXTREMES = (
    *reductions.TRUTHS,
    torch.max,
    Tensor.max,
    torch.min,
    Tensor.min,
    torch.amax,
    Tensor.amax,
    torch.amin,
    Tensor.amin,
)
_COMPARISONS = (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
_CASTS = ("clone", "detach", "to", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "type")
_PRODUCTS = (
    *(F.linear, torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm, torch.tensordot, torch.einsum),
    *(Tensor.matmul, Tensor.mm, Tensor.addmm, Tensor.__matmul__, Tensor.__rmatmul__),
)

HANDLERS |= {
    **dict.fromkeys(ELEMENTWISE, operations.elementwise),
    **dict.fromkeys(RESHAPED, operations.view),
    **dict.fromkeys(LISTS_ELEMENTWISE, operations.elementwise_lists),
    **dict.fromkeys(_PRODUCTS, operations.product),
    F.embedding: operations.lookup,
    **{getattr(Tensor, name): operations.cast_values for name in _CASTS},
    **dict.fromkeys((torch.clone, torch.detach), operations.cast_values),
    **dict.fromkeys(_NORMS, reductions.norm),
    torch._foreach_norm: reductions.foreach_norm,
    **dict.fromkeys(_SUMS, reductions.total),
    **dict.fromkeys(_EXTREMES, reductions.extreme),
    **dict.fromkeys(_COMPARISONS, reductions.comparison),
    **dict.fromkeys(_DRAWS, reductions.drawn),
    nn.init.constant_: operations.elementwise,
    torch.where: operations.where,
    torch.autograd.grad: operations.gradients,
    torch.autograd.backward: on_local,
    Tensor.__setitem__: operations.assign,
    Tensor.copy_: operations.copy,
    Tensor.register_hook: operations.register_hook,
    Tensor.device.__get__: operations.device,
    Tensor.data.__get__: operations.cast_values,  # type: ignore[attr-defined]
    Tensor.numpy: operations.as_array,
    Tensor.data.__set__: operations.set_data,  # type: ignore[attr-defined]
    torch.chunk: operations.chunk,
    Tensor.size: operations.size,
    Tensor.new_empty: operations.new_empty,
}

VIEW_HANDLERS |= {
    **dict.fromkeys(ELEMENTWISE, operations.elementwise_of_view),
    **dict.fromkeys(LISTS_ELEMENTWISE, operations.elementwise_lists),
    torch._foreach_norm: reductions.foreach_norm,
    Tensor.copy_: operations.copy,
    Tensor.__setitem__: operations.assign,
    **dict.fromkeys(RESHAPED, operations.view),
    **dict.fromkeys(_PRODUCTS, operations.product),
    F.embedding: operations.lookup,
    **dict.fromkeys((*(getattr(Tensor, name) for name in _CASTS), torch.clone, torch.detach), operations.view),
}
