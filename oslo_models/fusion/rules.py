"""The rules by which `fuse()` finds the modules that it can replace, and why it skips others.

The first of the ordered `RULES` that matches a module decides; modules without a matching rule are not reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from oslo_kernels import linear
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import apex, attention, mlps, norms, parallel_blocks
from oslo_models.fusion import modules as fused
from oslo_models.fusion.decode_attention import DecodingAttention
from oslo_models.fusion.experts import FusedExperts, FusedParallelExperts
from oslo_models.fusion.full_norms import FullNorms
from oslo_models.fusion.known_layers import (
    BERT_INTERMEDIATES,
    BERT_OUTPUTS,
    CALL_EAGER_ATTENTION,
    COHERE_BLOCKS,
    GATED_MLPS,
    GEMMA2_BLOCKS,
    GEMMA_NORMS,
    GPT2_MLPS,
    GPTJ_BLOCKS,
    GPTJ_MLPS,
    LLAMA_BLOCKS,
    NEOX_BLOCKS,
    NEOX_MLPS,
    OLMO2_BLOCKS,
    OLMO2_NORMS,
    PACKED_MLPS,
    PHI3_BLOCKS,
    PHI_BLOCKS,
    RMS_NORMS,
    ROTARY_LEFT_UNFUSED,
    T5_FEED_FORWARDS,
    layer_name,
    layer_name_of,
)
from oslo_models.fusion.lazy_logits import LazyFullHead, LazyVocabParallelHead
from oslo_models.fusion.rotary_attention import ROTARY_CLASSES, CPURotaryAttention, FusedOlmo2Attention
from oslo_models.fusion.subjects import Subject, mixed, one_pass, subjects
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.norm import HeadParallelNorm, WidthParallelNorm
from oslo_models.layers.vocab_parallel import VocabParallelHead
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class FusionRule:
    """How one kind of module is fused.

    Attributes:
        match: whether a module is of this kind.
        build: makes its candidates: one, except for a head whose loss cannot be fused but whose product can.
    """

    match: Callable[[Subject], bool]
    build: Callable[[Subject], Iterator[FusionCandidate]]


def fusion_candidates(model: Any, backend: str) -> Iterator[FusionCandidate]:
    """The candidates of a model: its modules that match a rule, and the model itself for its decoding."""
    yield from _decoding(model)
    for subject in subjects(model, backend):
        rule = next((rule for rule in RULES if rule.match(subject)), None)
        if rule is not None:
            yield from rule.build(subject)


_FEW_ROWS = "few rows, without gradients, in one call in C++"
_ONE_QUERY = "one query per row, without gradients, in C++"


# Decoding -------------------------------------------------------------------------------------------------------------


def _decoding(model: Any) -> Iterator[FusionCandidate]:
    if not model.can_generate():
        return
    cls, attributes = None, {}
    if model.device.type != "cuda":
        reason = "gains on a GPU, by CUDA graphs"
    elif not model._can_compile_fullgraph:
        reason = "transformers cannot decode this model with a static cache"
    elif model.is_pipeline_parallelized():
        reason = "stages decode in turn"
    else:
        cls, attributes = type(model), {"_decodes_in_graphs": True}
        reason = "static cache and CUDA graphs (compiled by the first generate)"
    yield FusionCandidate("", (type(model),), "decoding", cls, reason, attributes)


# Head and linear layers -----------------------------------------------------------------------------------------------

_NO_AXIS = Axis("tp", 0, (0,), None)
_LINEAR: dict[type, type] = {nn.Linear: fused.FusedLinear, Conv1D: fused.FusedConv1D}
_PRODUCTS: dict[Any, type] = {F.linear: fused.FusedProduct, linear.plain_conv1d: fused.FusedConv1DProduct}
"""What goes in front of the class of a sharded linear layer, by the function that this class multiplies with."""


def _lm_head(s: Subject) -> Iterator[FusionCandidate]:
    if s.model.loss_needs_full_logits:
        yield s.candidate("head and cross entropy", None, "the loss needs the logits of the full vocabulary")
        yield from _linear(s)
        return
    cls: type = LazyVocabParallelHead
    attributes: dict[str, Any] = {"lazy": False}
    if not isinstance(s.module, VocabParallelHead):
        vocab, hidden = s.module.weight.shape
        layout = Layout.sharded((vocab, hidden), 0, (EvenSplit(vocab),), 1)
        cls, attributes = LazyFullHead, {**attributes, "tp": _NO_AXIS, "layouts": {"weight": layout}}
    timed = s.model.device.type == "cpu"
    options = {"attributes": attributes, "timed": timed, "otherwise": cls if timed else None}
    yield s.candidate("head and cross entropy", cls, "loss without logits (training with labels)", **options)


def _linear(s: Subject) -> Iterator[FusionCandidate]:
    if (cls := _fused_linear(s)) is not None:
        yield s.candidate("linear", cls, "products", timed=True)


def _fused_linear(s: Subject) -> type | None:
    """The class of a linear layer whose products of few rows may be faster, on a CPU only."""
    if s.backend != "torch" or s.model.device.type != "cpu":
        return None
    product = _PRODUCTS.get(getattr(s.cls, "product", None))
    return _LINEAR.get(s.cls) if product is None else mixed(product, s.cls)


# Activations and norms ------------------------------------------------------------------------------------------------


_NORMS: dict[str, type] = {
    **dict.fromkeys(RMS_NORMS, norms.FusedRMSNorm),
    **dict.fromkeys(GEMMA_NORMS, norms.FusedGemmaNorm),
    **dict.fromkeys(OLMO2_NORMS, norms.FusedOlmo2Norm),
}
"""The fused form of each root-mean-square norm."""


def _gelu_new(s: Subject) -> Iterator[FusionCandidate]:
    yield s.candidate("gelu_new", fused.TanhGELU, "one operation instead of eight")


def _gelu(s: Subject) -> Iterator[FusionCandidate]:
    yield s.candidate("gelu", None, "is one operation of torch already")


def _norm_layer(s: Subject) -> str:
    """The layer of transformers that a norm is, or that each rank applies to its own heads."""
    return _sharded_layer(s.cls) if s.cls.forward is HeadParallelNorm.forward else s.layer


def _sharded_layer(cls: type) -> str:
    """The layer of transformers from which the class of a sharded norm is made."""
    return layer_name_of(cls.__mro__[cls.__mro__.index(HeadParallelNorm) + 1 :])


_SMALL_NORMS: dict[str, type] = {
    **dict.fromkeys(RMS_NORMS | OLMO2_NORMS, norms.SmallRMSNorm),
    **dict.fromkeys(GEMMA_NORMS, norms.SmallGemmaNorm),
}
"""The form of each root-mean-square norm on a CPU."""


def _rms_norm(s: Subject) -> Iterator[FusionCandidate]:
    if s.on_cpu:
        yield s.candidate("root mean square norm", mixed(_SMALL_NORMS[_norm_layer(s)], s.cls), _FEW_ROWS)
    elif s.layer in RMS_NORMS:
        yield s.on_gpu("root mean square norm", triton=norms.FusedRMSNorm, apex=apex.ApexRMSNorm)
    else:
        yield s.on_gpu("root mean square norm", triton=_NORMS[_norm_layer(s)])


def _is_fused_layer_norm(s: Subject) -> bool:
    """Triton gains only where the norm takes the residual with it; apex has a kernel for every LayerNorm."""
    if s.cls is not nn.LayerNorm or s.module.weight is None:
        return False
    _, norm = _BLOCKS.get(s.parent, (None, ""))
    return s.backend == "apex" or (s.backend == "triton" and norm == s.name.rpartition(".")[2])


def _layer_norm(s: Subject) -> Iterator[FusionCandidate]:
    cls = apex.ApexLayerNorm if s.backend == "apex" else norms.FusedLayerNorm
    yield s.candidate("LayerNorm", cls, one_pass(s.backend))


# MLPs -----------------------------------------------------------------------------------------------------------------

_MLPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GPT2_MLPS, ("c_fc", "act", "c_proj", "dropout")),
    **dict.fromkeys(GPTJ_MLPS, ("fc_in", "act", "fc_out", "dropout")),
    **dict.fromkeys(NEOX_MLPS, ("dense_h_to_4h", "act", "dense_4h_to_h")),
    **dict.fromkeys(BERT_INTERMEDIATES, ("dense", "intermediate_act_fn")),
}
"""MLPs that begin with a linear layer and an activation: the names of these two and of what follows."""


_GATED: dict[str, tuple[type, str]] = {
    **dict.fromkeys(GATED_MLPS, (mlps.FusedGatedMLP, "act_fn")),
    **dict.fromkeys(PACKED_MLPS, (mlps.FusedPackedMLP, "activation_fn")),
}
"""MLPs with a gate: their fused form, and the name of their activation."""


def _gate_activation(s: Subject) -> str | None:
    """The activation of a gated MLP, as `oslo_kernels.gated` calls it, if it has a kernel."""
    activation = getattr(s.module, _GATED[s.layer][1]) if s.layer in _GATED else None
    if isinstance(activation, (nn.SiLU, SiLUActivation)):
        return "silu"
    return {"tanh": "gelu_tanh", "none": "gelu"}.get(_form(activation) or "")


def _gated(s: Subject) -> Iterator[FusionCandidate]:
    activation = _gate_activation(s)
    operation = "SwiGLU" if activation == "silu" else "GeGLU"
    yield s.on_gpu(operation, attributes={"gate_activation": activation}, triton=_GATED[s.layer][0])


def _form(activation: Any) -> str | None:
    """How an activation approximates GeLU, as ``F.gelu`` calls it, if it is one."""
    if isinstance(activation, (NewGELUActivation, FastGELUActivation, GELUTanh)):
        return "tanh"
    return "none" if isinstance(activation, GELUActivation) else None


def _gelu_form(s: Subject) -> str | None:
    """The form of GeLU of an MLP that begins with a linear layer."""
    return _form(getattr(s.module, _MLPS[s.layer][1])) if s.layer in _MLPS else None


def _gelu_mlp(s: Subject) -> Iterator[FusionCandidate]:
    attributes = {"parts": _MLPS[s.layer], "approximate": _gelu_form(s)}
    yield s.on_gpu("bias and GeLU", attributes=attributes, triton=mlps.FusedGELUMLP)


def _has_experts(s: Subject) -> bool:
    """Whether it stacks experts in the layout of transformers, and leaves their products to its implementations."""
    return hasattr(s.module, "has_post_expert_norm") and hasattr(s.module, "down_proj")


def _experts(s: Subject) -> Iterator[FusionCandidate]:
    if s.model.device.type != "cpu":
        yield s.candidate("experts", None, "computed by grouped products already")
    elif s.module.has_post_expert_norm:
        yield s.candidate("experts", None, "a norm follows each expert")
    else:
        fused_class = FusedParallelExperts if isinstance(s.module, ParallelExperts) else FusedExperts
        yield s.candidate("experts", mixed(fused_class, s.cls), "few tokens without gradients, expert by expert")


# Residuals ------------------------------------------------------------------------------------------------------------

_BLOCKS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(LLAMA_BLOCKS, (fused.FusedLlamaBlock, "")),
    **dict.fromkeys(PHI3_BLOCKS, (fused.FusedPhi3Block, "")),
    **dict.fromkeys(GEMMA2_BLOCKS, (fused.FusedGemma2Block, "")),
    **dict.fromkeys(OLMO2_BLOCKS, (fused.FusedOlmo2Block, "")),
    **dict.fromkeys(NEOX_BLOCKS, (parallel_blocks.FusedNeoXBlock, "")),
    **dict.fromkeys(GPTJ_BLOCKS, (parallel_blocks.FusedGPTJBlock, "")),
    **dict.fromkeys(PHI_BLOCKS, (parallel_blocks.FusedPhiBlock, "")),
    **dict.fromkeys(COHERE_BLOCKS, (parallel_blocks.FusedCohereBlock, "")),
    "gpt2.GPT2Block": (fused.FusedGPT2Block, "ln_2"),
    "gpt_neo.GPTNeoBlock": (fused.FusedGPTNeoBlock, "ln_2"),
    **dict.fromkeys(BERT_OUTPUTS, (fused.FusedBertOutput, "LayerNorm")),
    **dict.fromkeys(T5_FEED_FORWARDS, (fused.FusedT5FeedForward, "")),
}
"""Modules that add a residual: their fused form, and the name of the LayerNorm (if any) that takes the residual."""


def _residual(s: Subject) -> Iterator[FusionCandidate]:
    attributes = None
    if s.layer in LLAMA_BLOCKS | PHI3_BLOCKS | GEMMA2_BLOCKS:
        norm = s.module.pre_feedforward_layernorm if s.layer in GEMMA2_BLOCKS else s.module.post_attention_layernorm
        if layer_name(norm) not in _NORMS:
            yield s.candidate("residual", None, "the norm after it has no kernel that adds the residual")
            return
        attributes = {"following": _following_norm(s)}
    if s.layer in NEOX_BLOCKS and not s.module.use_parallel_residual:
        yield s.candidate("residual", None, "fused with use_parallel_residual only")
        return
    yield s.on_gpu("residual", attributes=attributes, triton=_BLOCKS[s.layer][0])


def _following_norm(s: Subject) -> tuple[nn.Module, ...]:
    """The first norm of the next block, or the norm after the last block; empty where another stage has it."""
    around, _, index = s.name.rpartition(".")
    blocks = s.model.get_submodule(around)
    if int(index) + 1 < len(blocks):
        norm = getattr(blocks[int(index) + 1], "input_layernorm", None)
    else:
        norm = getattr(s.model.get_submodule(around.rpartition(".")[0]), "norm", None)
    return (norm,) if isinstance(norm, nn.Module) and layer_name(norm) in _NORMS else ()


def _bloom_mlp(s: Subject) -> Iterator[FusionCandidate]:
    yield s.on_gpu("residual", reason=f"dropout and residual: {one_pass(s.backend)}", triton=fused.FusedBloomMLP)


# Attention ------------------------------------------------------------------------------------------------------------

_EAGER: dict[str, type] = {"triton": attention.FusedEagerAttention, "apex": apex.ApexEagerAttention}
"""The fused form of an attention layer's softmax, by backend."""


def _bloom_attention(s: Subject) -> Iterator[FusionCandidate]:
    reason = "torch's attention, or with gradients its weights in one pass"
    yield s.on_gpu("attention", reason=reason, triton=attention.FusedBloomAttention)


def _is_rotary(s: Subject) -> bool:
    return s.layer in ROTARY_CLASSES and (s.backend == "triton" or s.on_cpu)


def _rotary(s: Subject) -> Iterator[FusionCandidate]:
    fused_cls = ROTARY_CLASSES[s.layer]
    if s.on_cpu:
        reason = f"{_ONE_QUERY}; rotary positions: {_FEW_ROWS}; otherwise {_attention_implementation(s.module)}"
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
    """The norms over all heads of an attention layer, if every rank has heads that no other rank has."""
    found, counts = [], []
    for norm in (layer.q_norm, layer.k_norm):
        axis, count, kind = _NO_AXIS, norm.weight.numel(), layer_name(norm)
        if isinstance(norm, WidthParallelNorm):
            layout, axis, kind = norm.layouts["weight"], norm.tp, _sharded_layer(type(norm))
            if layout.overlaps or not all(math.prod(layout.local_shape(rank)) for rank in range(axis.size)):
                return None
            count = layout.shape[0]
        if kind not in _NORMS:
            return None
        fused: Any = _NORMS[kind]
        found.append((axis, norm.variance_epsilon, fused.offset, fused.keeps_dtype))
        counts.append(count)
    turned = (getattr(layer.config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if found[0] != found[1] or turned != 1.0:
        return None
    axis, eps, offset, keeps_dtype = found[0]
    return FullNorms(axis, (counts[0], counts[1]), eps, offset, keeps_dtype)


def _upcasts(s: Subject) -> bool:
    """Whether GPT-2 computes its eager scores by code of its own."""
    return bool(getattr(s.module, "reorder_and_upcast_attn", False))


def _is_eager(s: Subject) -> bool:
    return s.layer in CALL_EAGER_ATTENTION and s.backend in _EAGER and not _upcasts(s)


def _eager(s: Subject) -> Iterator[FusionCandidate]:
    reason = f"{_attention_implementation(s.module)}; softmax of weights that are made: {one_pass(s.backend)}"
    attributes = {"own_config": s.module.config}
    yield s.candidate("attention", mixed(_EAGER[s.backend], s.cls), reason, attributes=attributes)


def _is_cached(s: Subject) -> bool:
    sdpa = s.layer in CALL_EAGER_ATTENTION and s.on_cpu and s.module.config._attn_implementation == "sdpa"
    return sdpa and bool(s.model.can_generate())


def _cached(s: Subject) -> Iterator[FusionCandidate]:
    reason = f"{_ONE_QUERY}; otherwise {_attention_implementation(s.module)}"
    attributes = {"own_config": s.module.config}
    yield s.candidate("attention", mixed(DecodingAttention, s.cls), reason, attributes=attributes)


def _other_attention(s: Subject) -> Iterator[FusionCandidate]:
    reason = _attention_implementation(s.module)
    if s.layer in ROTARY_LEFT_UNFUSED:
        reason = f"{reason}; left unfused: rotary positions in a forward unlike Llama's"
    elif _upcasts(s):
        reason = f"{reason}; left unfused: reorder_and_upcast_attn has a softmax of its own"
    yield s.candidate("attention", None, reason)


def _attention_implementation(module: Any) -> str:
    implementation = module.config._attn_implementation
    if implementation == "eager":
        return "eager attention was asked for; attn_implementation='sdpa' is faster where weights are not looked at"
    return f"computed by {implementation} attention already"


RULES: tuple[FusionRule, ...] = (
    FusionRule(lambda s: s.is_lm_head, _lm_head),
    FusionRule(lambda s: isinstance(s.module, NewGELUActivation), _gelu_new),
    FusionRule(lambda s: s.cls in (GELUActivation, GELUTanh), _gelu),
    FusionRule(lambda s: _norm_layer(s) in _NORMS, _rms_norm),
    FusionRule(_is_fused_layer_norm, _layer_norm),
    FusionRule(lambda s: _gate_activation(s) is not None, _gated),
    FusionRule(lambda s: _gelu_form(s) is not None, _gelu_mlp),
    FusionRule(_has_experts, _experts),
    FusionRule(lambda s: s.layer in _BLOCKS, _residual),
    FusionRule(lambda s: s.layer == "bloom.BloomMLP" and s.backend == "triton", _bloom_mlp),
    FusionRule(lambda s: s.layer == "bloom.BloomAttention", _bloom_attention),
    FusionRule(_is_rotary, _rotary),
    FusionRule(_is_eager, _eager),
    FusionRule(_is_cached, _cached),
    FusionRule(lambda s: s.cls.__name__.endswith("Attention") and hasattr(s.module, "config"), _other_attention),
    FusionRule(lambda s: _fused_linear(s) is not None, _linear),
)
"""In the order in which they are tried: the first that matches decides."""
