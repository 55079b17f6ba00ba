"""Attention to keys in several parts, with a part of the rows each: short rows attend to fewer columns than long ones.

A cache returns `PartStates` in place of the keys and values of all rows. Layers pass them on to the attention function
of their config. `attending_by_parts` selects a function that calls the layer's own one for each part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from oslo_models.fusion.attention import FUSED_EAGER, FusedEagerAttention
from oslo_models.fusion.decode_attention import DECODING, DecodingAttention
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION

PARTS = "oslo_models_parts_of_"
"""Begins the names of attention functions for parts. The name of the function for each part follows."""
IMPLEMENTATIONS = (*TORCH_ATTENTION, "eager")
"""Tested attention implementations."""


class PartStates:
    """Keys or values of one layer, in parts. It is no tensor, so that no other attention takes it for one.

    Attributes:
        parts: keys or values [rows of the part, heads, columns of the part, width]. The rows follow one another, and
            the last column of each part is the last column of the mask.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts


@contextmanager
def attending_by_parts(config: Any) -> Iterator[None]:
    """Context in which the attention layers of a config take `PartStates`."""
    own = config._attn_implementation
    config._attn_implementation = _registered(own)
    try:
        yield
    finally:
        config._attn_implementation = own


def attention_by_parts(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of each part by the layer's own function. Plain tensors are one part.

    Args:
        own: name of the layer's own attention implementation.
        attention_mask: ``[batch or 1, heads or 1, queries, columns]``.
        args, kwargs: further arguments of the attention function, which do not depend on rows.
    """
    attend = _own_function(own, module)
    if not isinstance(key, PartStates):
        plain: tuple[Tensor, Tensor | None] = attend(module, query, key, value, attention_mask, *args, **kwargs)
        return plain
    attended, first = [], 0
    for keys, values in zip(key.parts, value.parts, strict=True):
        rows, first = slice(first, first + len(keys)), first + len(keys)
        mask = attention_mask
        if mask is not None:  # else, all rows have the same length
            mask = mask[rows] if len(mask) > 1 else mask
            mask = mask[..., mask.shape[-1] - keys.shape[2] :]
        attended.append(attend(module, query[rows], keys, values, mask, *args, **kwargs)[0])
    return torch.cat(attended), None


def _own_function(own: str, module: nn.Module) -> Any:
    """Return the function that a layer calls without parts."""
    if own in TORCH_ATTENTION and isinstance(module, DecodingAttention):
        own = DECODING
    if own != "eager":
        return ALL_ATTENTION_FUNCTIONS[own]
    if isinstance(module, FusedEagerAttention):
        return ALL_ATTENTION_FUNCTIONS[FUSED_EAGER]
    cls: Any = type(module)
    return _eager_function(cls)


@functools.cache
def _eager_function(cls: Any) -> Any:
    """Return the eager attention of the file of a layer, which the layer passes to transformers' registry."""
    files = (vars(sys.modules[base.__module__]) for base in cls.__mro__)
    return next(names["eager_attention_forward"] for names in files if "eager_attention_forward" in names)


def _mask(own: str, *args: Any, **kwargs: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)


@functools.cache
def _registered(own: str) -> str:
    """Return the name of `attention_by_parts` for an attention implementation."""
    if own.startswith(PARTS):  # a forward inside a forward
        return own
    AttentionInterface.register(PARTS + own, partial(attention_by_parts, own))
    AttentionMaskInterface.register(PARTS + own, partial(_mask, own))
    return PARTS + own


for _each in IMPLEMENTATIONS:  # before fusions are checked, see `verdicts`
    _registered(_each)
