"""Functions of tensors that know a larger shape than they store."""

from __future__ import annotations

from torch import Tensor

PLAIN_FUNCTIONS = {
    *(Tensor.dim, Tensor.is_floating_point, Tensor.is_complex, Tensor.register_hook, Tensor.get_device),
    Tensor.is_contiguous,
    *(
        getattr(Tensor, name).__get__
        for name in ("device", "dtype", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "layout", "ndim", "is_meta")
    ),
}
"""Called on the local tensor directly, as they do not depend on the sizes of its dimensions."""
