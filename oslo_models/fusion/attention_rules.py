"""The rules of `fuse()` for attention layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import apex, attention, norms
from oslo_models.fusion.decode_attention import DecodingAttention
from oslo_models.fusion.full_norms import FullNorms
from oslo_models.fusion.known_layers import (
    CALL_EAGER_ATTENTION,
    COMPARE_IMPLEMENTATIONS,
    ROTARY_LEFT_UNFUSED,
    layer_name,
)
from oslo_models.fusion.module_context import ONE_PASS, FusionRule, ModuleContext, mixed, one_pass
from oslo_models.fusion.rotary_attention import ROTARY_CLASSES, CPURotaryAttention, FusedOlmo2Attention
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION
from oslo_models.layers.norm import WidthParallelNorm

_ONE_QUERY = "one query per row, without gradients, in C++"

SDPA = "transformers.integrations.sdpa_attention.sdpa_attention_forward"

_EAGER: dict[str, type] = {"triton": attention.FusedEagerAttention, "apex": apex.ApexEagerAttention}
"""The fused class for an attention layer's softmax, by backend."""


def _bloom_attention(s: ModuleContext) -> Iterator[FusionCandidate]:
    reason = "torch's attention, or with gradients its weights in one pass"
    yield s.on_gpu("attention", reason=reason, triton=attention.FusedBloomAttention)


def _is_rotary(s: ModuleContext) -> bool:
    return s.layer in ROTARY_CLASSES and (s.backend == "triton" or s.on_cpu)


def _rotary(s: ModuleContext) -> Iterator[FusionCandidate]:
    fused_cls = ROTARY_CLASSES[s.layer]
    if s.on_cpu:
        reason = f"{_ONE_QUERY}; rotary positions: {ONE_PASS}; otherwise {_attention_implementation(s.module)}"
        on_cpu = mixed(mixed(CPURotaryAttention, fused_cls), s.cls)
        yield s.candidate("attention", on_cpu, reason, attributes={"own_config": s.module.config})
        return
    reason = f"rotary positions and softmax of weights that are made: {one_pass(s.backend)}"
    attributes = {"own_config": s.module.config}
    if issubclass(fused_cls, FusedOlmo2Attention):
        attributes["full_norms"] = full_norms = _full_norms(s.module)
        reason = f"norms over all heads, {reason}" if full_norms else reason
    reason = f"{_attention_implementation(s.module)}; {reason}"
    yield s.candidate("attention", mixed(fused_cls, s.cls), reason, attributes=attributes)


def _full_norms(layer: Any) -> FullNorms | None:
    """Return the norms over all heads of an attention layer, or ``None`` if they cannot be fused.

    Every rank needs at least one head, and no head may be on several ranks.
    """
    found, counts = [], []
    whole = Axis.alone("tp")
    for norm in (layer.q_norm, layer.k_norm):
        axis, count, kind = whole, norm.weight.numel(), layer_name(norm)
        if isinstance(norm, WidthParallelNorm):
            layout, axis, kind = norm.layouts["weight"], norm.tp, norms.layer_of_sharded(type(norm))
            if layout.overlaps or not all(math.prod(layout.local_shape(rank)) for rank in range(axis.size)):
                return None
            count = layout.shape[0]
        if kind not in norms.ON_GPU:
            return None
        fused: Any = norms.ON_GPU[kind]
        found.append((axis, norm.variance_epsilon, fused.offset, fused.keeps_dtype))
        counts.append(count)
    turned = (getattr(layer.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if found[0] != found[1] or turned != 1.0:
        return None
    axis, eps, offset, keeps_dtype = found[0]
    return FullNorms(axis, (counts[0], counts[1]), eps, offset, keeps_dtype)


def _upcasts(s: ModuleContext) -> bool:
    """Return whether GPT-2 computes its eager scores by separate code."""
    return bool(getattr(s.module, "reorder_and_upcast_attn", False))


def _can_select(s: ModuleContext) -> bool:
    """Return whether another attention function may replace the layer's function."""
    return s.layer in CALL_EAGER_ATTENTION - COMPARE_IMPLEMENTATIONS and not _upcasts(s)


def _is_eager(s: ModuleContext) -> bool:
    return _can_select(s) and s.backend in _EAGER


def _eager(s: ModuleContext) -> Iterator[FusionCandidate]:
    reason = f"{_attention_implementation(s.module)}; softmax of weights that are made: {one_pass(s.backend)}"
    attributes = {"own_config": s.module.config}
    yield s.candidate("attention", mixed(_EAGER[s.backend], s.cls), reason, attributes=attributes)


def _is_cached(s: ModuleContext) -> bool:
    sdpa = _can_select(s) and s.on_cpu and s.module.config._attn_implementation in TORCH_ATTENTION
    return sdpa and bool(s.model.can_generate())


def _cached(s: ModuleContext) -> Iterator[FusionCandidate]:
    reason = f"{_ONE_QUERY}; otherwise {_attention_implementation(s.module)}"
    attributes = {"own_config": s.module.config}
    yield s.candidate("attention", mixed(DecodingAttention, s.cls), reason, attributes=attributes)


def _other_attention(s: ModuleContext) -> Iterator[FusionCandidate]:
    reason = _attention_implementation(s.module)
    if s.layer in ROTARY_LEFT_UNFUSED:
        reason = f"{reason}; left unfused: rotary positions in a forward unlike Llama's"
    elif _upcasts(s):
        reason = f"{reason}; left unfused: reorder_and_upcast_attn uses another softmax"
    elif s.layer in COMPARE_IMPLEMENTATIONS:
        reason = f"{reason}; left unfused: it hides keys from the implementations that it knows by name"
    yield s.candidate("attention", None, reason)


def _attention_implementation(module: Any) -> str:
    implementation = module.config._attn_implementation
    if implementation == "eager":
        return "eager attention was asked for; attn_implementation='sdpa' is faster where weights are not looked at"
    return f"computed by {'sdpa' if implementation in TORCH_ATTENTION else implementation} attention already"


ATTENTION_RULES = (
    FusionRule(lambda s: s.layer == "bloom.BloomAttention", _bloom_attention),
    FusionRule(_is_rotary, _rotary, (SDPA,)),
    FusionRule(_is_eager, _eager),
    FusionRule(_is_cached, _cached, (SDPA,)),
    FusionRule(lambda s: s.cls.__name__.endswith("Attention") and hasattr(s.module, "config"), _other_attention),
)
"""The rules in order. The last rule reports unfused layers."""
