"""The tables of transformers' layers in fusion: they are complete and match the installed transformers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import transformers
from torch import nn
from transformers.models.bert import modeling_bert as bert
from transformers.models.cohere import modeling_cohere as cohere
from transformers.models.flex_olmo import modeling_flex_olmo as flex_olmo
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.opt import modeling_opt as opt
from transformers.models.phi import modeling_phi as phi
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.t5 import modeling_t5 as t5

from oslo_models import registry
from oslo_models.fusion import known_layers
from oslo_models.fusion.rotary_attention import ROTARY_CLASSES

COPIES = {
    "RMS_NORMS": (llama.LlamaRMSNorm, t5.T5LayerNorm),
    "GATED_MLPS": (llama.LlamaMLP,),
    "GEMMA_NORMS": (gemma.GemmaRMSNorm,),
    "OLMO2_NORMS": (olmo2.Olmo2RMSNorm,),
    "PACKED_MLPS": (phi3.Phi3MLP,),
    "NEOX_MLPS": (gpt_neox.GPTNeoXMLP,),
    "GEMMA2_BLOCKS": (gemma2.Gemma2DecoderLayer,),
    "GPT2_MLPS": (gpt2.GPT2MLP,),
    "GPTJ_MLPS": (gptj.GPTJMLP,),
    "BERT_INTERMEDIATES": (bert.BertIntermediate,),
    "LLAMA_BLOCKS": (llama.LlamaDecoderLayer,),
    "PHI3_BLOCKS": (phi3.Phi3DecoderLayer,),
    "OLMO2_BLOCKS": (olmo2.Olmo2DecoderLayer, flex_olmo.FlexOlmoDecoderLayer),
    "NEOX_BLOCKS": (gpt_neox.GPTNeoXLayer,),
    "GPTJ_BLOCKS": (gptj.GPTJBlock,),
    "PHI_BLOCKS": (phi.PhiDecoderLayer,),
    "COHERE_BLOCKS": (cohere.CohereDecoderLayer,),
    "BERT_OUTPUTS": (bert.BertOutput,),
    "T5_FEED_FORWARDS": (t5.T5LayerFF,),
}
CALL_EAGER_ATTENTION = [module.eager_attention_forward for module in (llama, bert, gpt2, opt, t5, gemma2)]
ROTARY = [module.apply_rotary_pos_emb for module in (llama, olmo2, phi3, gpt_neox)]
"""They rotate a whole head or its first part, and may cast the result; `rotary` replaces each of them."""
NOT_FUSED = {"mt5.MT5LayerNorm", "qwen4_exp.Qwen4ExpTextRMSNorm", "umt5.UMT5LayerNorm"}
"""Copies that fusion never replaces. The copy of Qwen4-Exp calls a separate function that may average over groups."""


def layers() -> Iterator[tuple[str, Any]]:
    """Yield every layer in the transformers modules of registered classes."""
    names = [name for model_type in registry.ARCHITECTURES for name in registry.names(model_type)]
    modules = {getattr(transformers, name).__module__ for name in names if hasattr(transformers, name)}
    for module in map(importlib.import_module, sorted(modules)):
        for name, cls in vars(module).items():
            own = inspect.isclass(cls) and cls.__module__ == module.__name__
            if own and issubclass(cls, nn.Module) and "forward" in cls.__dict__:
                yield f"{module.__name__.split('.')[-2]}.{name}", cls


def check_table(found: Iterable[str], table: frozenset[str]) -> None:
    """Check that a table is correct and complete. Older releases lack some layers and may have further copies."""
    if registry.NEWER:
        assert table & dict(layers()).keys() <= set(found)
    else:
        assert set(found) == table


def code(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Return the code of a function; copies with other annotations, docstrings and local names are equal."""
    function = inspect.unwrap(function)
    code = function.__code__
    constants = tuple(constant for constant in code.co_consts if constant not in (None, function.__doc__))
    return code.co_code, code.co_names, constants, code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


@pytest.mark.parametrize("table", COPIES)
def test_copies_of_a_layer(table: str) -> None:
    known = {code(original.forward) for original in COPIES[table]}
    copies = {name for name, cls in layers() if code(cls.forward) in known}
    check_table(copies - NOT_FUSED, getattr(known_layers, table))


def callers(functions: list[Any]) -> dict[str, Any]:
    """Return the layers that call one of these functions or a copy."""
    name, known = functions[0].__name__, {code(function) for function in functions}
    found = {}
    for layer, cls in layers():
        forward = inspect.unwrap(cls.forward)
        around = forward.__globals__
        if name in forward.__code__.co_names and name in around and code(around[name]) in known:
            found[layer] = cls
    return found


def test_layers_with_eager_attention() -> None:
    """All layers that use the implementation name for more than a function lookup are known."""
    found = callers(CALL_EAGER_ATTENTION)
    check_table(found, known_layers.CALL_EAGER_ATTENTION)
    compared = set()
    for layer, cls in found.items():
        constants = inspect.unwrap(cls.forward).__code__.co_consts
        if "eager" in {name for each in constants for name in (each if isinstance(each, tuple) else (each,))}:
            compared.add(layer)
    assert compared == {"gpt2.GPT2Attention", *known_layers.COMPARE_IMPLEMENTATIONS} & found.keys()


@pytest.mark.parametrize("original", known_layers.ROTARY_ATTENTIONS)
def test_copies_of_a_rotary_attention(original: str) -> None:
    rotary = callers(ROTARY)
    copied = code(rotary[original].forward)
    copies = {name for name, cls in rotary.items() if code(cls.forward) == copied}
    check_table(copies, known_layers.ROTARY_ATTENTIONS[original])


def test_layers_with_rotary_positions() -> None:
    """Each layer that calls Llama's function has a fused forward, or is listed without one."""
    fused = frozenset().union(*known_layers.ROTARY_ATTENTIONS.values())
    check_table(callers(ROTARY), fused | known_layers.ROTARY_LEFT_UNFUSED)
    assert not fused & known_layers.ROTARY_LEFT_UNFUSED
    assert set(ROTARY_CLASSES) == fused


def test_names_of_layers() -> None:
    class Wrapped(llama.LlamaRMSNorm):
        """Like a class from FSDP: another class with the same forward."""

    class Changed(llama.LlamaRMSNorm):
        def forward(self, x: Any) -> Any:
            return x

    assert known_layers.layer_name(Wrapped(3)) == "llama.LlamaRMSNorm"
    assert known_layers.layer_name(Changed(3)) == known_layers.layer_name(nn.Linear(1, 1)) == ""
