"""The tables of transformers' layers that fusion knows: complete, and true of the installed transformers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transformers
from torch import nn
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.opt import modeling_opt as opt
from transformers.models.t5 import modeling_t5 as t5

from oslo_models import registry
from oslo_models.fusion import known_layers

COPIES = {
    "RMS_NORMS": (llama.LlamaRMSNorm, t5.T5LayerNorm),
    "GATED_MLPS": (llama.LlamaMLP,),
    "GPT2_MLPS": (gpt2.GPT2MLP,),
    "GPTJ_MLPS": (gptj.GPTJMLP,),
    "BERT_INTERMEDIATES": (bert.BertIntermediate,),
    "LLAMA_BLOCKS": (llama.LlamaDecoderLayer,),
    "BERT_OUTPUTS": (bert.BertOutput,),
    "T5_FEED_FORWARDS": (t5.T5LayerFF,),
}
CALLS = {
    "CALL_EAGER_ATTENTION": [module.eager_attention_forward for module in (llama, bert, gpt2, opt, t5)],
    "CALL_ROTARY": [llama.apply_rotary_pos_emb],
}
NOT_FUSED = {"mt5.MT5LayerNorm", "umt5.UMT5LayerNorm"}
"""Copies that fusion has never replaced."""


def layers() -> Iterator[tuple[str, Any]]:
    """Every layer in the modules of transformers that the registry's classes come from."""
    names = [name for model_type in registry.ARCHITECTURES for name in registry.names(model_type)]
    modules = {getattr(transformers, name).__module__ for name in names if hasattr(transformers, name)}
    for module in map(importlib.import_module, sorted(modules)):
        for name, cls in vars(module).items():
            own = inspect.isclass(cls) and cls.__module__ == module.__name__
            if own and issubclass(cls, nn.Module) and "forward" in cls.__dict__:
                yield f"{module.__name__.split('.')[-2]}.{name}", cls


def code(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What a function does: equal for copies, whatever their annotations, docstrings and local names."""
    function = inspect.unwrap(function)
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if constant not in (None, function.__doc__))
    return code.co_code, code.co_names, constants, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@pytest.mark.parametrize("table", COPIES)
def test_copies_of_a_layer(table: str) -> None:
    known = {code(original.forward) for original in COPIES[table]}
    copies = {name for name, cls in layers() if code(cls.forward) in known}
    assert copies - NOT_FUSED == getattr(known_layers, table)


@pytest.mark.parametrize("table", CALLS)
def test_callers_of_a_function(table: str) -> None:
    name, known = CALLS[table][0].__name__, {code(function) for function in CALLS[table]}
    callers = set()
    for layer, cls in layers():
        called = name in cls.forward.__code__.co_names and cls.forward.__globals__.get(name)
        if called and code(called) in known:
            callers.add(layer)
    assert callers == getattr(known_layers, table)


def test_names_of_layers() -> None:
    class Wrapped(llama.LlamaRMSNorm):
        """As FSDP and others make: another class, the same forward."""

    class Changed(llama.LlamaRMSNorm):
        def forward(self, x: Any) -> Any:
            return x

    assert known_layers.layer_name(Wrapped(3)) == "llama.LlamaRMSNorm"
    assert known_layers.layer_name(Changed(3)) == known_layers.layer_name(nn.Linear(1, 1)) == ""
