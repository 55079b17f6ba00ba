"""Which modules of a model fusion has an opinion on: what `Fusion` swaps, and why it leaves the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import FastGELUActivation, GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.bert import modeling_bert as bert
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.opt import modeling_opt as opt
from transformers.models.t5 import modeling_t5 as t5
from transformers.pytorch_utils import Conv1D

from oslo_kernels import linear
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import apex
from oslo_models.fusion import modules as fused
from oslo_models.fusion.lazy_logits import LazyFullHead, LazyVocabParallelHead
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.layers.vocab_parallel import VocabParallelHead
from oslo_models.pipeline.placeholders import Placeholder
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.plan import VocabParallel

_NO_AXIS = Axis("tp", 0, (0,), None)

# Blocks whose second norm takes the residual before it, by the name of that norm, and other modules with a residual.
_BLOCKS: dict[type, tuple[type, str]] = {
    llama.LlamaDecoderLayer: (fused.FusedLlamaBlock, ""),
    gpt2.GPT2Block: (fused.FusedGPT2Block, "ln_2"),
    gpt_neo.GPTNeoBlock: (fused.FusedGPTNeoBlock, "ln_2"),
    bert.BertOutput: (fused.FusedBertOutput, "LayerNorm"),
    t5.T5LayerFF: (fused.FusedT5FeedForward, ""),
}
# MLPs that begin with a linear layer and a GeLU: the names of these two and of what follows.
_MLPS: dict[type, tuple[str, ...]] = {
    gpt2.GPT2MLP: ("c_fc", "act", "c_proj", "dropout"),
    gptj.GPTJMLP: ("fc_in", "act", "fc_out", "dropout"),
    bert.BertIntermediate: ("dense", "intermediate_act_fn"),
}
# Functions that layers call by name: those whose code is known, and what they become.
_Functions = dict[str, tuple[tuple[Any, ...], Callable[..., Any]]]
_EAGER = tuple(module.eager_attention_forward for module in (llama, bert, gpt2, opt, t5))
_FUNCTIONS: dict[str, _Functions] = {
    "triton": {
        "apply_rotary_pos_emb": ((llama.apply_rotary_pos_emb,), fused.fused_rotary),
        "eager_attention_forward": (_EAGER, fused.fused_eager_attention),
        "dropout_add": ((bloom.dropout_add,), lambda plain: fused.dropout_add),
    },
    "apex": {"eager_attention_forward": (_EAGER, apex.apex_eager_attention)},
}
# Linear layers, and what goes in front of the classes of sharded ones, by what these multiply with.
_LINEAR: dict[type, type] = {nn.Linear: fused.FusedLinear, Conv1D: fused.FusedConv1D}
_PRODUCTS: dict[Any, type] = {F.linear: fused.FusedProduct, linear.plain_conv1d: fused.FusedConv1DProduct}
_CALLED = {
    "apply_rotary_pos_emb": "rotary positions",
    "eager_attention_forward": "softmax of weights that are made",
    "dropout_add": "dropout and residual",
}


def fusion_candidates(model: Any, backend: str) -> Iterator[FusionCandidate]:
    """Every module of a model that fusion has an opinion on."""
    head = {**model.plan(model.config).under(model._prefix()).head, **type(model).head_plan}
    heads = {name for name, entry in head.items() if isinstance(entry, VocabParallel)}
    norms: set[str] = set()
    yield from _decoding(model)
    of_other_stages: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if isinstance(module, Placeholder) or name.startswith(of_other_stages):
            of_other_stages += (f"{name}.",) if isinstance(module, Placeholder) else ()
            continue
        classes = _classes_around(model, name)
        if name in heads and isinstance(module, nn.Linear):
            yield (site := _head(model, name, module, classes))
            if site.cls is None:
                yield from _linear(model, name, module, classes, backend)
        elif isinstance(module, NewGELUActivation):
            yield FusionCandidate(name, classes, "gelu_new", fused.TanhGELU, "one operation instead of eight")
        elif type(module) in (GELUActivation, GELUTanh):
            yield FusionCandidate(name, classes, "gelu", None, "is one operation of torch already")
        elif _computes(module, llama.LlamaRMSNorm) or isinstance(module, t5.T5LayerNorm):
            by = {"triton": fused.FusedRMSNorm, "apex": apex.ApexRMSNorm}
            yield _on_gpu(name, classes, "root mean square norm", by, module, backend)
        elif type(module) is nn.LayerNorm and module.weight is not None and (name in norms or backend == "apex"):
            by = {"triton": fused.FusedLayerNorm, "apex": apex.ApexLayerNorm}
            yield FusionCandidate(name, classes, "LayerNorm", by[backend], _one_pass(backend))
        elif _computes(module, llama.LlamaMLP) and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            yield _on_gpu(name, classes, "SwiGLU", {"triton": fused.FusedSwiGLU}, module, backend)
        elif (parts := _known(module, _MLPS)) and (form := _gelu_form(getattr(module, parts[1]))):
            given = {"parts": parts, "approximate": form}
            yield _on_gpu(name, classes, "bias and GeLU", {"triton": fused.FusedGELUMLP}, module, backend, given)
        elif found := _known(module, _BLOCKS):
            cls, norm = found
            if norm and backend == "triton":
                norms.add(f"{name}.{norm}")
            yield _on_gpu(name, classes, "residual", {"triton": cls}, module, backend)
        elif _computes(module, bloom.BloomAttention):
            by = {"triton": fused.FusedBloomAttention}
            yield _on_gpu(
                name,
                classes,
                "attention",
                by,
                module,
                backend,
                why="torch's attention, or with gradients its weights in one pass",
            )
        elif called := _functions(_class_of(module), backend):
            yield _calling(name, module, classes, called, backend)
        elif type(module).__name__.endswith("Attention") and hasattr(module, "config"):
            yield FusionCandidate(name, classes, "attention", None, _how_attention_is_computed(module))
        else:
            yield from _linear(model, name, module, classes, backend)


def _decoding(model: Any) -> Iterator[FusionCandidate]:
    if not model.can_generate():
        return
    classes, operation = (type(model),), "decoding"
    if model.device.type != "cuda":
        yield FusionCandidate("", classes, operation, None, "gains on a GPU, by CUDA graphs")
    elif not model._can_compile_fullgraph:
        yield FusionCandidate("", classes, operation, None, "transformers cannot decode this model with a static cache")
    elif model.is_pipeline_parallelized():
        yield FusionCandidate("", classes, operation, None, "stages decode in turn")
    else:
        reason = "static cache and CUDA graphs (compiled by the first generate)"
        yield FusionCandidate("", classes, operation, type(model), reason, {"_decodes_in_graphs": True})


def _head(model: Any, name: str, module: nn.Linear, classes: tuple[type, ...]) -> FusionCandidate:
    if getattr(model.config, "final_logit_softcapping", None):
        return FusionCandidate(
            name, classes, "head and cross entropy", None, "logits are capped by tanh before the loss"
        )
    if model.loss_needs_full_logits:
        return FusionCandidate(name, classes, "head and cross entropy", None, "the loss needs the logits of all words")
    reason = "loss without logits (training with labels)"
    cls: type = LazyVocabParallelHead
    attributes: dict[str, Any] = {"deferring": False}
    if not isinstance(module, VocabParallelHead):
        layout = Layout.divided(tuple(module.weight.shape), 0, (EvenSplit(module.weight.shape[0]),), 1)
        cls, attributes = LazyFullHead, {**attributes, "tp": _NO_AXIS, "layouts": {"weight": layout}}
    timed = model.device.type == "cpu"
    return FusionCandidate(
        name, classes, "head and cross entropy", cls, reason, attributes, timed, cls if timed else None
    )


def _linear(
    model: Any, name: str, module: nn.Module, classes: tuple[type, ...], backend: str
) -> Iterator[FusionCandidate]:
    """Linear layers may gain on a CPU."""
    cls = _fused_linear(_class_of(module)) if backend == "torch" and model.device.type == "cpu" else None
    if cls is None:
        return
    yield FusionCandidate(name, classes, "linear", cls, "products of few rows, without gradients, in C++", timed=True)


@cache
def _fused_linear(cls: Any) -> type | None:
    product = getattr(cls, "product", None)
    if product not in _PRODUCTS:
        return _LINEAR.get(cls)
    return _with(_PRODUCTS[product], cls)


def _on_gpu(
    name: str,
    classes: tuple[type, ...],
    operation: str,
    by: dict[str, Any],
    module: nn.Module,
    backend: str,
    attributes: dict[str, Any] | None = None,
    why: str | None = None,
) -> FusionCandidate:
    """A site whose kernels exist for GPUs only; on CPUs torch's own one is no faster than the expression."""
    if backend in by:
        cls = _with(by[backend], _class_of(module))
        return FusionCandidate(name, classes, operation, cls, why or _one_pass(backend), attributes or {})
    reason = "apex has no kernel for it" if backend == "apex" else "gains on a GPU, in Triton"
    return FusionCandidate(name, classes, operation, None, reason)


def _one_pass(backend: str) -> str:
    return "one pass in apex" if backend == "apex" else "one pass in Triton"


def _known(module: nn.Module, table: dict[type, Any]) -> Any:
    return next((value for cls, value in table.items() if _computes(module, cls)), None)


def _gelu_form(activation: nn.Module) -> str | None:
    """How an activation approximates GeLU, if it is one."""
    if isinstance(activation, (NewGELUActivation, FastGELUActivation, GELUTanh)):
        return "tanh"
    return "none" if isinstance(activation, GELUActivation) else None


# Layers that compute what others do: transformers repeats code from model to model ------------------------------------


def _computes(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a module's forward is a copy of another class's."""
    return _same_code(type(module).forward, cls.forward)


def _same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    return _code(one) == _code(other)


@cache
def _code(function: Callable[..., Any]) -> tuple[Any, ...]:
    function = inspect.unwrap(function)
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if constant not in (None, function.__doc__))
    return code.co_code, code.co_names, constants, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _class_of(module: nn.Module) -> Any:
    return type(module)


@cache
def _with(fused: Any, cls: Any) -> type:
    """``cls`` with the forward of ``fused``."""
    return type(f"Fused{cls.__name__}", (fused, cls), {"__module__": __name__})


@cache
def _functions(cls: Any, backend: str) -> tuple[str, ...]:
    """The names of functions that a layer's forward calls and that have a fused form."""
    forward = cls.forward
    if backend not in _FUNCTIONS or not isinstance(forward, FunctionType):
        return ()
    known = []
    for name, (plain, _) in _FUNCTIONS[backend].items():
        own = forward.__globals__.get(name) if name in forward.__code__.co_names else None
        if own is not None and any(_same_code(own, function) for function in plain):
            known.append(name)
    return tuple(known)


@cache
def _calling_fused(cls: Any, names: tuple[str, ...], backend: str) -> type:
    """``cls`` whose forward, transformers' own code, finds fused functions under the names of others.

    `torch.compile` looks for names in the module of the code instead, and there is nothing to be fused for it.
    """
    own = cls.forward
    other = {name: _FUNCTIONS[backend][name][1](own.__globals__[name]) for name in names}
    calling = FunctionType(own.__code__, {**own.__globals__, **other}, own.__name__, own.__defaults__, own.__closure__)
    calling.__kwdefaults__ = own.__kwdefaults__

    @wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (own if torch.compiler.is_compiling() else calling)(self, *args, **kwargs)

    return type(f"Fused{cls.__name__}", (cls,), {"__module__": __name__, "forward": forward})


def _calling(
    name: str, module: Any, classes: tuple[type, ...], called: tuple[str, ...], backend: str
) -> FusionCandidate:
    what = f"{' and '.join(_CALLED[function] for function in called)}: {_one_pass(backend)}"
    operation = "attention" if type(module).__name__.endswith("Attention") else "residual"
    if hasattr(module, "config") and operation == "attention":
        what = f"{_how_attention_is_computed(module)}; {what}"
    return FusionCandidate(name, classes, operation, _calling_fused(_class_of(module), called, backend), what)


def _how_attention_is_computed(module: Any) -> str:
    implementation = module.config._attn_implementation
    if implementation == "eager":
        return "eager attention was asked for; attn_implementation='sdpa' is faster where weights are not looked at"
    return f"computed by {implementation} attention already"


def _classes_around(model: nn.Module, name: str) -> tuple[type, ...]:
    """The classes of transformers' layers around a module, its own first if it is one, and that of the model last."""
    found: list[type] = []
    module = model
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        if type(module).__module__.startswith("transformers.models."):
            found.insert(0, type(module))
    return (*found, type(model))
