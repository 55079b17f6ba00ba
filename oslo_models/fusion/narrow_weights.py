"""Add narrow copies of the weights to the linear layers of a model on a CPU, for ``fuse(weights=...)``.

The parameters stay unchanged, so checkpoints have full precision and `unfuse` has nothing to restore.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import unavailable_reason
from oslo_kernels.narrow_linear import DTYPES, NarrowWeight, largest, narrow_linear
from oslo_models.distributed.collectives import MAX, all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.layers.linear import RowParallelConv1D, RowParallelLinear


class NarrowProduct(nn.Module):
    """The product of a linear layer with its weight in fewer bits.

    Attributes:
        narrow: the weight in fewer bits.
        made_from: the address and version of ``weight`` when the copy was made.
    """

    narrow: NarrowWeight
    made_from: tuple[int, int]
    weight: Tensor

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``, or the product of ``Conv1D``.

        Raises:
            RuntimeError: gradients are required, or the parameter has changed.
        """
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, self.weight, bias)):
            raise RuntimeError(
                f"the model was fused with weights={_name(self.narrow)!r}, which cannot be trained: call it under "
                "torch.no_grad(), or call unfuse() first"
            )
        if not self.is_current():
            raise RuntimeError(
                f"the weight of a layer has changed since fuse(weights={_name(self.narrow)!r}), which computes with a "
                "copy of it in fewer bits: call unfuse() and fuse() again"
            )
        return narrow_linear(x, self.narrow, bias)

    def is_current(self) -> bool:
        """Return whether the parameter is unchanged since its narrow copy was made."""
        return _identity(self.weight) == self.made_from


def check_narrow(weights: str, device: torch.device, dtype: torch.dtype, backend: str) -> None:
    """Raise ``ValueError`` if ``fuse(weights=...)`` cannot be used with a model."""
    if weights not in DTYPES:
        raise ValueError(
            f"weights={weights!r} is none of {', '.join(map(repr, DTYPES))}; None keeps the model's weights"
        )
    if device.type != "cpu" or backend != "torch":
        raise ValueError(
            f"weights={weights!r} is for models on a CPU (backend='torch'), but this one is on {device} with "
            f"backend={backend!r}: load it with quantization_config=TorchAoConfig(...)"
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weights={weights!r} computes in float32, but the model is in {dtype}")
    if why := unavailable_reason():
        raise ValueError(f"weights={weights!r} needs a compiled kernel: {why}")


def narrow(
    model: nn.Module, candidates: Iterable[FusionCandidate], selected: set[type] | None, tp: Axis | None, weights: str
) -> list[FusionCandidate]:
    """Give the selected linear layers among ``candidates`` narrow weights. A collective of the ranks of ``tp``.

    Scales are computed from the full weight, so that every rank has a shard of the narrow weight of one process.
    """
    return [
        _narrowed(candidate, model.get_submodule(candidate.module), tp, weights)
        if candidate.timed and candidate.is_selected(selected)
        else candidate
        for candidate in candidates
    ]


def _narrowed(candidate: FusionCandidate, module: Any, tp: Axis | None, weights: str) -> FusionCandidate:
    dtype, weight = DTYPES[weights], local_tensor(module.weight).detach()
    if weight.dtype is not torch.float32 and dtype is not torch.int8:
        return candidate  # the weight is already as narrow
    weight_oi = weight.t() if isinstance(module, Conv1D) else weight
    largest_o = None
    if dtype is torch.int8:
        largest_o = largest(weight_oi)
        if tp is not None and tp.size > 1 and isinstance(module, (RowParallelLinear, RowParallelConv1D)):
            largest_o = all_reduce(tp, largest_o.float(), MAX)
    made = NarrowWeight.of(weight_oi, dtype, largest_o)
    attributes = {**candidate.attributes, "narrow": made, "made_from": _identity(module.weight)}
    reason = f"products with weights in {weights}, without gradients, in C++"
    assert candidate.cls is not None
    return replace(candidate, cls=_with_narrow(candidate.cls), attributes=attributes, reason=reason, timed=False)


@cache
def _with_narrow(cls: type) -> type:
    return type(cls.__name__.replace("Fused", "Narrow"), (NarrowProduct, cls), {"__module__": __name__})


def _identity(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _name(made: NarrowWeight) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype is made.values.dtype)
