"""Cuts decoder blocks to a few heads and a few features of the MLP while `self_check` compares them.

A block of full size reads all its weights in each run, which takes longer than everything else in the check. Two groups
of heads and some features of the MLP run the same code. The hidden states and each head keep their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.decoder_layers import GPT2, LINEAR_FORWARDS, BlockForm
from oslo_models.fusion.narrow_weights import NarrowProduct

_GROUPS, _FEATURES = 2, 128


@contextmanager
def small(blocks: Iterable[tuple[Any, BlockForm]]) -> Iterator[None]:
    """Cut these blocks, and restore their parameters afterwards. The caller restores the attributes of the modules."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        with without_override(), torch.no_grad():
            for block, form in blocks:
                attention, mlp = getattr(block, form.attention), getattr(block, form.mlp)
                parts = _linears(attention, (*form.into, form.out)), _linears(mlp, (*form.mlp_into, form.mlp_out))
                kept += [(each._parameters, dict(each._parameters)) for part in parts for each in part or ()]
                if parts[0] is not None:
                    _cut_attention(attention, form, *parts[0])
                if parts[1] is not None:
                    _cut_mlp(*parts[1])
        yield
    finally:
        for now, before in kept:  # in place, so that fused blocks notice it
            now.update(before)


def _linears(parent: Any, names: tuple[str, ...]) -> list[Any] | None:
    """Return the linear layers, or ``None`` if one of them computes with more than weight and bias."""
    found = [getattr(parent, name) for name in names]
    plain = (type(each).forward in LINEAR_FORWARDS and not isinstance(each, NarrowProduct) for each in found)
    return found if all(plain) else None


def _cut_attention(attention: Any, form: BlockForm, *layers: Any) -> None:
    *into, out = layers
    outputs = [_sizes(layer)[0] // attention.head_dim for layer in into]
    heads, groups, _ = outputs if len(into) == 3 else [outputs[0] // 3] * 3
    if groups <= _GROUPS or heads != groups * getattr(attention, "num_key_value_groups", 1):
        return
    of_queries, of_keys = (count // groups * _GROUPS * attention.head_dim for count in (heads, groups))
    if len(into) == 3:
        for layer, kept in zip(into, (of_queries, of_keys, of_keys), strict=True):
            _cut(layer, outputs=[range(kept)])
    else:
        third = heads * attention.head_dim
        _cut(into[0], outputs=[range(start, start + of_keys) for start in (0, third, 2 * third)])
    if form is GPT2:
        attention.__dict__.update(split_size=of_keys, num_heads=_GROUPS)
    _cut(out, inputs=of_queries)


def _cut_mlp(*layers: Any) -> None:
    *into, out = layers
    features = _sizes(out)[1]
    kept = _FEATURES + features % _FEATURES  # the same remainder in vectorised loops
    if kept < features:
        for layer in into:
            _cut(layer, outputs=[range(kept)])
        _cut(out, inputs=kept)


def _sizes(layer: Any) -> tuple[int, int]:
    """Return the numbers of outputs and inputs."""
    first, second = layer.weight.shape
    return (second, first) if isinstance(layer, Conv1D) else (first, second)


def _cut(layer: Any, outputs: list[range] | None = None, inputs: int | None = None) -> None:
    """Keep some outputs, or the first inputs, of a linear layer."""
    weight_oi, bias = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight, layer.bias
    if outputs is None:
        weight_oi = weight_oi[:, :inputs]
    else:
        weight_oi = torch.cat([weight_oi[kept.start : kept.stop] for kept in outputs])
        bias = None if bias is None else torch.cat([bias[kept.start : kept.stop] for kept in outputs])
    if isinstance(layer, Conv1D):
        layer.__dict__["nf"] = len(weight_oi)
        weight_oi = weight_oi.t()
    layer._parameters["weight"] = _like(layer.weight, weight_oi)
    if outputs is not None and bias is not None:
        layer._parameters["bias"] = _like(layer.bias, bias)


def _like(parameter: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.contiguous(), parameter.requires_grad)
