"""parallelformers' `Layer` and `Policy`, as its POLICY.md describes them; `policy_plan` turns them into plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


@dataclass
class Layer:
    """One layer of a block, of those that a `Policy` lists.

    Attributes:
        weight, bias: the names of its tensors inside the block, such as ``"attn.c_attn.weight"``. Either will do.
        n_fused: how many matrices of equal size lie side by side in the weight: 3 for query, key and value.
        replace: for layers whose outputs are summed, `AllReduceLinear` or `AllReduceConv1D`.
        reversed: whether the weight is stored ``[in, out]``, as that of ``Conv1D``.
        ignore_checker: some blocks of the class lack the layer.
    """

    weight: str | None = None
    bias: str | None = None
    n_fused: int | None = None
    replace: Any = None
    reversed: bool | None = None
    ignore_checker: bool = False


class Policy:
    """How the blocks of one class are sharded. Subclasses override what applies; all methods are static."""

    @staticmethod
    def replace_arguments(config: Any, world_size: int) -> dict[str, Any]:
        """Attributes inside a block, by their path, and the values that they have on each of ``world_size`` ranks."""
        return {}

    @staticmethod
    def replace_modules() -> dict[str, type]:
        """For names of classes, the classes whose methods replace those of the modules of that class."""
        return {}

    @staticmethod
    def attn_qkv() -> list[Layer]:
        """The projections to query, key and value."""
        return []

    @staticmethod
    def attn_out() -> list[Layer]:
        """The projections of attention outputs, which are summed over the ranks."""
        return []

    @staticmethod
    def mlp_in() -> list[Layer]:
        """The first layers of the MLP."""
        return []

    @staticmethod
    def mlp_out() -> list[Layer]:
        """The last layers of the MLP, whose outputs are summed over the ranks."""
        return []

    @staticmethod
    def original_layer_class() -> type[nn.Module]:
        """The class of the blocks."""
        raise TypeError("a policy has to override original_layer_class, which returns the class of the blocks")


class AllReduceLinear(nn.Linear):
    """What a policy names as ``replace``: the layer becomes a row-parallel one, whatever the class."""


class AllReduceConv1D(Conv1D):
    """As `AllReduceLinear`, for ``Conv1D``."""
