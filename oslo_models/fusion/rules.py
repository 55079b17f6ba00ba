"""The rules of `fuse()`: they find replaceable modules, and give the reasons for skipping others.

The first matching rule of the ordered `RULES` decides. Modules without a matching rule are not reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.pytorch_utils import Conv1D

from oslo_kernels import decoder_block, linear
from oslo_models.contracts import broken
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import apex, decoder_blocks, decoder_layers, mlps, norms, parallel_blocks
from oslo_models.fusion import modules as fused
from oslo_models.fusion.attention_rules import ATTENTION_RULES, SDPA
from oslo_models.fusion.experts import FusedExperts, FusedParallelExperts
from oslo_models.fusion.known_layers import (
    BERT_INTERMEDIATES,
    BERT_OUTPUTS,
    COHERE_BLOCKS,
    GATED_MLPS,
    GEMMA2_BLOCKS,
    GPT2_MLPS,
    GPTJ_BLOCKS,
    GPTJ_MLPS,
    LLAMA_BLOCKS,
    NEOX_BLOCKS,
    NEOX_MLPS,
    OLMO2_BLOCKS,
    PACKED_MLPS,
    PHI3_BLOCKS,
    PHI_BLOCKS,
    RMS_NORMS,
    T5_FEED_FORWARDS,
    changed_kind,
    layer_name,
    layer_name_of,
)
from oslo_models.fusion.lazy_logits import LazyFullHead, LazyVocabParallelHead
from oslo_models.fusion.module_context import ONE_PASS, FusionRule, ModuleContext, mixed, module_contexts, one_pass
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.norm import HeadParallelNorm
from oslo_models.layers.vocab_parallel import VocabParallelHead
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import EvenSplit, Layout


def fusion_candidates(model: ShardedModel, backend: str) -> Iterator[FusionCandidate]:
    """Yield the candidates of a model: the model itself for decoding, and all modules that match a rule."""
    yield from _decoding(model)
    changed: dict[FusionRule, str | None] = {}
    for subject in module_contexts(model, backend):
        rule = next((rule for rule in RULES if rule.match(subject)), None)
        if rule is not None:
            why = changed[rule] if rule in changed else changed.setdefault(rule, rule.changed())
            yield from (each if why is None else each.left_out(why) for each in rule.build(subject))


# Decoding -------------------------------------------------------------------------------------------------------------


def _decoding(model: ShardedModel) -> Iterator[FusionCandidate]:
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

_LINEAR: dict[type, type] = {nn.Linear: fused.FusedLinear, Conv1D: fused.FusedConv1D}
_PRODUCTS: dict[Any, type] = {
    linear.untimed_linear: fused.FusedProduct,
    linear.untimed_conv1d: fused.FusedConv1DProduct,
}
"""The mixins for sharded linear layers, by the product function of the layer's class."""


def _lm_head(s: ModuleContext) -> Iterator[FusionCandidate]:
    reason = "the loss needs the logits of the full vocabulary" if s.model.loss_needs_full_logits else ""
    if s.cls not in (nn.Linear, VocabParallelHead):
        reason = "the head has its own forward"
    if reason:
        yield s.candidate("head and cross entropy", None, reason)
        yield from _linear(s)
        return
    cls: type = LazyVocabParallelHead
    attributes: dict[str, Any] = {"lazy": False}
    if not isinstance(s.module, VocabParallelHead):
        vocab, hidden = s.module.weight.shape
        layout = Layout.sharded((vocab, hidden), 0, (EvenSplit(vocab),), 1)
        cls, attributes = LazyFullHead, {**attributes, "tp": Axis.alone("tp"), "layouts": {"weight": layout}}
    timed = s.model.device.type == "cpu"
    options = {"attributes": attributes, "timed": timed, "otherwise": cls if timed else None}
    yield s.candidate("head and cross entropy", cls, "loss without logits (training with labels)", **options)


def _linear(s: ModuleContext) -> Iterator[FusionCandidate]:
    if (cls := _fused_linear(s)) is not None:
        yield s.candidate("linear", cls, "products", timed=True)


def _fused_linear(s: ModuleContext) -> type | None:
    """Return the fused class of a linear layer on a CPU with possibly faster products of few rows, or ``None``."""
    if s.backend != "torch" or s.model.device.type != "cpu":
        return None
    product = _PRODUCTS.get(getattr(s.cls, "product", None))
    return _LINEAR.get(s.cls) if product is None else mixed(product, s.cls)


# Layers that transformers has changed ---------------------------------------------------------------------------------


def _changed(s: ModuleContext) -> tuple[str, str] | None:
    return changed_kind(_original_classes(s.cls))


def _left_out(s: ModuleContext) -> Iterator[FusionCandidate]:
    operation, changed = _changed(s) or ("", "")
    yield s.candidate(operation, s.cls, "").left_out(changed)


# Activations and norms ------------------------------------------------------------------------------------------------


def _gelu_new(s: ModuleContext) -> Iterator[FusionCandidate]:
    yield s.candidate("gelu_new", fused.TanhGELU, "one operation instead of eight")


def _gelu(s: ModuleContext) -> Iterator[FusionCandidate]:
    yield s.candidate("gelu", None, "is one operation of torch already")


def _norm_layer(s: ModuleContext) -> str:
    """Return the transformers layer of a norm. Norms that ranks apply to their heads count as the original layer."""
    return layer_name_of(_original_classes(s.cls)) if s.cls.forward is HeadParallelNorm.forward else s.layer


def _original_classes(cls: type) -> tuple[type, ...]:
    """Return the classes of a layer, without the classes that shard a norm."""
    mro = cls.__mro__
    return mro[mro.index(HeadParallelNorm) + 1 :] if HeadParallelNorm in mro else mro


def _rms_norm(s: ModuleContext) -> Iterator[FusionCandidate]:
    if s.on_cpu:
        yield s.candidate("root mean square norm", mixed(norms.ON_CPU[_norm_layer(s)], s.cls), ONE_PASS)
    elif s.layer in RMS_NORMS:
        yield s.on_gpu("root mean square norm", triton=norms.FusedRMSNorm, apex=apex.ApexRMSNorm)
    else:
        yield s.on_gpu("root mean square norm", triton=norms.ON_GPU[_norm_layer(s)])


def _is_fused_layer_norm(s: ModuleContext) -> bool:
    """Triton gains only if the norm also adds the residual; apex has a kernel for every LayerNorm."""
    if s.cls is not nn.LayerNorm or s.module.weight is None:
        return False
    _, norm = _BLOCKS.get(s.parent, (None, ""))
    return s.backend == "apex" or (s.backend == "triton" and norm == s.name.rpartition(".")[2])


def _layer_norm(s: ModuleContext) -> Iterator[FusionCandidate]:
    cls = apex.ApexLayerNorm if s.backend == "apex" else norms.FusedLayerNorm
    yield s.candidate("LayerNorm", cls, one_pass(s.backend))


# MLPs -----------------------------------------------------------------------------------------------------------------

_MLPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GPT2_MLPS, ("c_fc", "act", "c_proj", "dropout")),
    **dict.fromkeys(GPTJ_MLPS, ("fc_in", "act", "fc_out", "dropout")),
    **dict.fromkeys(NEOX_MLPS, ("dense_h_to_4h", "act", "dense_4h_to_h")),
    **dict.fromkeys(BERT_INTERMEDIATES, ("dense", "intermediate_act_fn")),
}
"""MLPs that begin with a linear layer and an activation: the names of all layers in order."""


_GATED: dict[str, tuple[type, str]] = {
    **dict.fromkeys(GATED_MLPS, (mlps.FusedGatedMLP, "act_fn")),
    **dict.fromkeys(PACKED_MLPS, (mlps.FusedPackedMLP, "activation_fn")),
}
"""MLPs with a gate: the fused class, and the name of the activation."""


def _gate_activation(s: ModuleContext) -> str | None:
    """Return the name of a gated MLP's activation in `oslo_kernels.gated`, or ``None`` without a kernel."""
    return _activation_name(getattr(s.module, _GATED[s.layer][1])) if s.layer in _GATED else None


def _activation_name(activation: Any) -> str | None:
    """Return the name of an activation in `oslo_kernels.gated`, or ``None`` without a kernel."""
    if isinstance(activation, (nn.SiLU, SiLUActivation)) and _is_known(activation):
        return "silu"
    return {"tanh": "gelu_tanh", "none": "gelu"}.get(_form(activation) or "")


def _gated(s: ModuleContext) -> Iterator[FusionCandidate]:
    activation = _gate_activation(s)
    operation = "SwiGLU" if activation == "silu" else "GeGLU"
    yield s.on_gpu(operation, attributes={"gate_activation": activation}, triton=_GATED[s.layer][0])


def _is_known(activation: Any) -> bool:
    """Return whether an activation of transformers is unchanged from the checked releases."""
    known = (cls for cls in type(activation).__mro__ if cls in _ACTIVATIONS)
    return all(broken(f"transformers.activations.{cls.__name__}.forward") is None for cls in known)


_ACTIVATIONS = (FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation)


def _form(activation: Any) -> str | None:
    """Return the ``approximate`` argument of ``F.gelu`` for an activation, or ``None`` if it is no GeLU."""
    if not _is_known(activation):
        return None
    if isinstance(activation, (NewGELUActivation, FastGELUActivation, GELUTanh)):
        return "tanh"
    return "none" if isinstance(activation, GELUActivation) else None


def _gelu_form(s: ModuleContext) -> str | None:
    """Return the GeLU form of an MLP that begins with a linear layer."""
    return _form(getattr(s.module, _MLPS[s.layer][1])) if s.layer in _MLPS else None


def _gelu_mlp(s: ModuleContext) -> Iterator[FusionCandidate]:
    attributes = {"parts": _MLPS[s.layer], "approximate": _gelu_form(s)}
    yield s.on_gpu("bias and GeLU", attributes=attributes, triton=mlps.FusedGELUMLP)


def _has_experts(s: ModuleContext) -> bool:
    """Return whether a module stacks experts in transformers' layout and leaves the products to transformers."""
    return hasattr(s.module, "is_concatenated") and hasattr(s.module, "down_proj")


def _experts(s: ModuleContext) -> Iterator[FusionCandidate]:
    if s.model.device.type != "cpu":
        yield s.candidate("experts", None, "computed by grouped products already")
    elif getattr(s.module, "has_post_expert_norm", False):  # since transformers 5.23
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
"""Modules that add a residual: the fused class, and the name of the LayerNorm (if any) that adds the residual."""


def _residual(s: ModuleContext) -> Iterator[FusionCandidate]:
    attributes = None
    if s.layer in LLAMA_BLOCKS | PHI3_BLOCKS | GEMMA2_BLOCKS:
        norm = s.module.pre_feedforward_layernorm if s.layer in GEMMA2_BLOCKS else s.module.post_attention_layernorm
        if layer_name(norm) not in norms.ON_GPU:
            yield s.candidate("residual", None, "the norm after it has no kernel that adds the residual")
            return
        attributes = {"following": _following_norm(s)}
    if s.layer in NEOX_BLOCKS and not s.module.use_parallel_residual:
        yield s.candidate("residual", None, "fused with use_parallel_residual only")
        return
    yield s.on_gpu("residual", attributes=attributes, triton=_BLOCKS[s.layer][0])


_DECODING = {*LLAMA_BLOCKS, "gpt2.GPT2Block"}
"""Blocks with C++ support for single tokens."""


def _block_form(s: ModuleContext) -> decoder_layers.BlockForm | None:
    """Return the layer names of a block, or ``None`` if one of the layers is unknown."""
    if s.layer not in _DECODING or not s.on_cpu or decoder_block.unavailable_reason() or not s.model.can_generate():
        return None
    form = decoder_layers.form_of(s.module)
    mlp = None if form is None else getattr(s.module, form.mlp)
    is_known = mlp is not None and layer_name(mlp) in (*GATED_MLPS, *GPT2_MLPS)
    return form if is_known and _mlp_activation(mlp) is not None else None


def _mlp_activation(mlp: Any) -> str | None:
    """Return the activation's name in `oslo_kernels.decoder_block`, for a gated MLP or GPT-2's MLP, or ``None``."""
    activation = getattr(mlp, "act_fn" if layer_name(mlp) in GATED_MLPS else "act")
    name = _activation_name(activation)
    return name if name in decoder_block.ACTIVATIONS else None


def _decoding_block(s: ModuleContext) -> Iterator[FusionCandidate]:
    form = _block_form(s)
    assert form is not None
    activation = _mlp_activation(getattr(s.module, form.mlp))
    assert activation is not None
    attributes = {"decoding": decoder_blocks.BlockDecoding(form, activation)}
    yield s.candidate("block", mixed(decoder_blocks.DecodingBlock, s.cls), _ONE_TOKEN, attributes=attributes)


_ONE_TOKEN = "one token per row, without gradients, in two calls in C++"


def _following_norm(s: ModuleContext) -> tuple[nn.Module, ...]:
    """Return the first norm of the next block, or the norm after the last block. Empty if another stage has it."""
    around, _, index = s.name.rpartition(".")
    blocks: Any = s.model.get_submodule(around)
    of_head = s.model.plan(s.model.config).under(s.model._prefix()).pipeline.blocks_of_head.get(around, 0)
    count, following = getattr(blocks, "full_count", len(blocks) - of_head), int(index) + 1
    norm = None
    if following < count:  # the blocks keep their numbers on every stage
        norm = getattr(blocks._modules.get(str(following)), "input_layernorm", None)
    elif following == count:
        norm = getattr(s.model.get_submodule(around.rpartition(".")[0]), "norm", None)
    return (norm,) if isinstance(norm, nn.Module) and layer_name(norm) in norms.ON_GPU else ()


def _bloom_mlp(s: ModuleContext) -> Iterator[FusionCandidate]:
    yield s.on_gpu("residual", reason=f"dropout and residual: {one_pass(s.backend)}", triton=fused.FusedBloomMLP)


_LINEARS = ("torch.nn.modules.linear.Linear.forward", "transformers.pytorch_utils.Conv1D.forward")
_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm.forward"
_EXPERTS = ("batched_mm_experts_forward", "use_experts_implementation", "_default_apply_gate")

RULES: tuple[FusionRule, ...] = (
    FusionRule(lambda s: s.is_lm_head, _lm_head, _LINEARS),
    FusionRule(lambda s: _changed(s) is not None, _left_out),
    FusionRule(
        lambda s: isinstance(s.module, NewGELUActivation),
        _gelu_new,
        ("transformers.activations.NewGELUActivation.forward",),
    ),
    FusionRule(lambda s: s.cls in (GELUActivation, GELUTanh), _gelu),
    FusionRule(lambda s: _norm_layer(s) in norms.ON_GPU, _rms_norm),
    FusionRule(_is_fused_layer_norm, _layer_norm, (_LAYER_NORM,)),
    FusionRule(lambda s: _gate_activation(s) is not None, _gated),
    FusionRule(lambda s: _gelu_form(s) is not None, _gelu_mlp),
    FusionRule(_has_experts, _experts, tuple(f"transformers.integrations.moe.{name}" for name in _EXPERTS)),
    FusionRule(lambda s: _block_form(s) is not None, _decoding_block, (SDPA, _LAYER_NORM, *_LINEARS)),
    FusionRule(lambda s: s.layer in _BLOCKS, _residual),
    FusionRule(lambda s: s.layer == "bloom.BloomMLP" and s.backend == "triton", _bloom_mlp),
    *ATTENTION_RULES,
    FusionRule(lambda s: _fused_linear(s) is not None, _linear, _LINEARS),
)
"""The rules in order. The first matching rule decides."""
