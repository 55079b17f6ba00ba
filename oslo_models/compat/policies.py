"""parallelformers' `Layer` and `Policy`, as its POLICY.md describes them; `policy_plan` turns them into plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


@dataclass
class Layer:
    """One linear layer of a block, listed by a `Policy`.

    Attributes:
        weight, bias: the names of its tensors inside the block, such as ``"attn.c_attn.weight"``. Either will do.
        n_fused: number of equally large matrices side by side in the weight: 3 for query, key and value.
        replace: for layers with all-reduced outputs, `AllReduceLinear` or `AllReduceConv1D`.
        reversed: whether the weight is stored ``[in, out]``, as in ``Conv1D``.
        ignore_checker: some blocks of the class lack the layer.
    """

    weight: str | None = None
    bias: str | None = None
    n_fused: int | None = None
    replace: Any = None
    reversed: bool | None = None
    ignore_checker: bool = False


class Policy:
    """Sharding policy for the blocks of one class. Subclasses override methods as needed; all methods are static."""

    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> dict[str, Any]:
        """Return attribute paths inside a block, with their values on each of ``world_size`` ranks."""
        return {}

    @staticmethod
    def replace_modules() -> dict[str, type]:
        """Return ``{class name: class}``: modules of the named class get the methods of the given class."""
        return {}

    @staticmethod
    def attn_qkv() -> list[Layer]:
        """Return the query, key and value projections."""
        return []

    @staticmethod
    def attn_out() -> list[Layer]:
        """Return the output projections of the attention; their outputs are all-reduced."""
        return []

    @staticmethod
    def mlp_in() -> list[Layer]:
        """Return the first linear layers of the MLP."""
        return []

    @staticmethod
    def mlp_out() -> list[Layer]:
        """Return the last linear layers of the MLP; their outputs are all-reduced."""
        return []

    @staticmethod
    def original_layer_class() -> type[nn.Module]:
        """Return the class of the blocks."""
        raise TypeError("a policy has to override original_layer_class, which returns the class of the blocks")


class AllReduceLinear(nn.Linear):
    """Value for ``replace`` in a policy: the linear layer becomes row-parallel, regardless of its class."""


class AllReduceConv1D(Conv1D):
    """The same as `AllReduceLinear`, for ``Conv1D``."""
