"""Attention to keys in several parts, with a part of the rows each: short rows attend to fewer columns than long ones.

A cache returns `PartStates` in place of the keys and values of all rows. Layers pass them on to the attention function
of their config. `attending_by_parts` selects a function that calls the layer's own one for each part.

Two kinds of layers compute with cached keys before. Latent attention (DeepSeek-V2) expands latents to keys and values,
for each part. Layers in `INNER` have no attention function: between their projections, they run once for each part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from oslo_models.cache_argument import cache_name, named_arguments
from oslo_models.fusion.attention import FUSED_EAGER, FusedEagerAttention
from oslo_models.fusion.decode_attention import DECODING, DecodingAttention
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION
from oslo_models.layers.function_overrides import override_attributes

PARTS = "oslo_models_parts_of_"
"""Begins the names of attention functions for parts. The name of the function for each part follows."""
IMPLEMENTATIONS = (*TORCH_ATTENTION, "eager")
"""Tested attention implementations."""
INNER: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("BloomAttention", "FalconAttention"), ("query_key_value", "dense")),
    "MptAttention": ("Wqkv", "out_proj"),
}
"""Classes of transformers that compute attention themselves, with their projections before and after it."""
_WITH_ROWS = ("alibi", "attention_mask", "position_embeddings", "position_ids")
_WITH_COLUMNS = ("alibi", "attention_mask")
"""Arguments of these classes with entries for rows, and with entries for columns in the last dimension."""


class PartStates:
    """Keys or values of one layer, in parts. It is no tensor, so that no other attention takes it for one.

    Attributes:
        parts: keys or values [rows of the part, heads, columns of the part, width]. The rows follow one another, and
            the last column of each part is the last column of the mask.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts


def layers_by_parts(model: Any) -> list[nn.Module]:
    """Return the attention layers of a model that compute with cached keys before an attention function, or without."""
    return [each for each in model.modules() if hasattr(each, "expand_kv") or _inner_class(each) is not None]


def _inner_class(layer: nn.Module) -> Any:
    """Return the class in `INNER` of a layer; ``None`` for other layers."""
    return next((base for base in type(layer).__mro__ if base.__name__ in INNER), None)


@contextmanager
def attending_by_parts(config: Any, layers: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Context in which the attention layers of a config take `PartStates`.

    Args:
        layers: see `layers_by_parts`.
    """
    own = config._attn_implementation
    inner = [each for each in layers if _inner_class(each) is not None]
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(override_attributes(layer, _methods_by_parts(layer)))
        if not inner:  # they compare the name
            config._attn_implementation = _registered(own)
            stack.callback(setattr, config, "_attn_implementation", own)
        yield


def _methods_by_parts(layer: Any) -> dict[str, Any]:
    if _inner_class(layer) is not None:
        return {"forward": partial(_forward_by_parts, layer, layer.forward)}
    return {"expand_kv": partial(_expand_by_parts, layer, layer.expand_kv)}


def _expand_by_parts(layer: Any, expand: Any, latents: Any, rotary: Any) -> tuple[Any, Any]:
    """Return the keys and values of latents [rows, 1, columns, width] in parts."""
    if not isinstance(latents, PartStates):
        plain: tuple[Tensor, Tensor] = expand(latents, rotary)
        return plain
    if "forward" not in vars(layer.kv_b_proj):
        keys, values = zip(*map(expand, latents.parts, rotary.parts), strict=True)
        return PartStates(keys), PartStates(values)
    # each row has an adapter of its own: the layer takes all rows at once
    most = max(part.shape[2] for part in latents.parts)
    padded = (
        torch.cat([F.pad(part, (0, 0, most - part.shape[2], 0)) for part in states.parts])
        for states in (latents, rotary)
    )
    sizes = [len(part) for part in latents.parts]
    found = (states.split(sizes) for states in expand(*padded))
    expanded_keys, expanded_values = (
        [own[:, :, most - part.shape[2] :] for own, part in zip(states, latents.parts, strict=True)] for states in found
    )
    return PartStates(expanded_keys), PartStates(expanded_values)


def _forward_by_parts(layer: Any, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute the forward of a layer in `INNER`, its attention part by part.

    Args:
        hidden: [rows, queries, channels].
        args, kwargs: further arguments of the forward.
    """
    cls = _inner_class(layer)
    given, name = named_arguments(cls.forward, args, kwargs), cache_name(cls.forward)
    cache = given.pop(name, None)
    parts = getattr(cache, "shown", ())
    if len(parts) < 2:
        return forward(hidden, **given, **{name: cache})
    before, after = INNER[cls.__name__]
    residual = given.pop("residual", None)
    projected, attended, first = getattr(layer, before)(hidden), [], 0
    for part in parts:
        rows, first = slice(first, first + len(part.lengths)), first + len(part.lengths)
        columns = part.window + hidden.shape[1]
        own = {key: _of_part(key, value, len(hidden), rows, columns) for key, value in given.items()}
        own |= {} if residual is None else {"residual": hidden.new_zeros(())}
        with override_attributes(layer, {before: partial(_given, projected[rows]), after: nn.Identity()}):
            attended.append(forward(hidden[rows], **own, **{name: part})[0])
    output = getattr(layer, after)(torch.cat(attended))
    return (output if residual is None else residual + output), None


def _given(value: Tensor, hidden: Tensor) -> Tensor:
    return value


def _of_part(name: str, value: Any, count: int, rows: slice, columns: int) -> Any:
    """Return the entries of some of ``count`` rows, and of the last columns, in an argument."""
    if isinstance(value, tuple):
        return tuple(_of_part(name, each, count, rows, columns) for each in value)
    if name not in _WITH_ROWS or not isinstance(value, Tensor):
        return value
    if len(value) >= count:  # else, it is the same for all rows
        value = value.unflatten(0, (count, -1))[rows].flatten(0, 1)  # BLOOM has one entry for each row and head
    return value[..., value.shape[-1] - columns :] if name in _WITH_COLUMNS else value


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
