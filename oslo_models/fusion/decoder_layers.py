"""Find the layers of a decoder block for `decoder_blocks`, and check that they are unchanged."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.decoder_block import Block, LinearWeights, NormWeights
from oslo_models.fusion.known_layers import layer_name
from oslo_models.fusion.modules import FusedConv1D, FusedLinear
from oslo_models.fusion.narrow_weights import NarrowProduct
from oslo_models.fusion.norms import CPURMSNorm
from oslo_models.fusion.rotary_attention import (
    ROTARY_CLASSES,
    FusedLlamaAttention,
    FusedMistralAttention,
    FusedQwen2Attention,
    FusedQwen3Attention,
    FusedSeedOssAttention,
    FusedSmolLM3Attention,
)
from oslo_models.layers.linear import ColumnParallelLinear, KeyValueParallelLinear, RowParallelLinear
from oslo_models.layers.norm import HeadParallelNorm

_ROW = RowParallelLinear.forward  # RowParallelConv1D shares this method
LINEAR_FORWARDS = (
    *(nn.Linear.forward, FusedLinear.forward, Conv1D.forward, FusedConv1D.forward),
    *(ColumnParallelLinear.forward, KeyValueParallelLinear.forward, _ROW),
)
"""The forwards of linear layers that consist of a product, an all-reduce over ranks, and a bias only."""


@dataclass(frozen=True)
class BlockForm:
    """The names of the layers in a class of blocks.

    Attributes:
        norms: the norms before the attention and before the MLP.
        into: the attention's projections to queries, keys and values.
        head_norms: the attention's norms of query and key heads.
        rotary: whether queries and keys have rotary positions.
        mlp_into: the MLP's first projections: the gate first, if there is one.
    """

    norms: tuple[str, str]
    attention: str
    into: tuple[str, ...]
    out: str
    mlp: str
    mlp_into: tuple[str, ...]
    mlp_out: str
    head_norms: tuple[str, str] | None = None
    rotary: bool = True


_OF_LLAMA: dict[str, Any] = {
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "attention": "self_attn",
    "into": ("q_proj", "k_proj", "v_proj"),
    "out": "o_proj",
    "mlp": "mlp",
    "mlp_into": ("gate_proj", "up_proj"),
    "mlp_out": "down_proj",
}
LLAMA, SMOLLM3 = BlockForm(**_OF_LLAMA), BlockForm(**_OF_LLAMA, rotary=False)
QWEN3 = BlockForm(**_OF_LLAMA, head_norms=("q_norm", "k_norm"))
GPT2 = BlockForm(
    norms=("ln_1", "ln_2"),
    attention="attn",
    into=("c_attn",),
    out="c_proj",
    mlp="mlp",
    mlp_into=("c_fc",),
    mlp_out="c_proj",
    rotary=False,
)


_ROTARY: dict[Any, BlockForm] = {
    **dict.fromkeys((FusedLlamaAttention, FusedMistralAttention, FusedQwen2Attention, FusedSeedOssAttention), LLAMA),
    FusedQwen3Attention: QWEN3,
}


def form_of(block: Any) -> BlockForm | None:
    """Return the layer names in a block of GPT-2 or a copy of Llama, or ``None`` if its attention is unknown."""
    if layer_name(block) == "gpt2.GPT2Block":
        is_known = layer_name(block.attn) == "gpt2.GPT2Attention" and not hasattr(block, "crossattention")
        return GPT2 if is_known else None
    attention = block.self_attn
    cls = ROTARY_CLASSES.get(layer_name(attention))
    if cls is FusedSmolLM3Attention:
        return LLAMA if attention.use_rope else SMOLLM3
    return _ROTARY.get(cls)


class BlockLayers:
    """The layers of a block at the time of the search.

    `are_in_place` runs for each block and token, so its comparisons loop in C.

    Attributes:
        products: the linear layers of the block.
        is_current: whether all narrow weights are copies of the current parameters.
    """

    def __init__(self, block: nn.Module, form: BlockForm) -> None:
        attention, mlp = block._modules[form.attention], block._modules[form.mlp]
        assert attention is not None and mlp is not None
        self.attention: Any = attention
        self._places: list[tuple[dict[str, Any], str]] = []
        self._find(block, (form.attention, form.mlp))
        self.norms = self._find(block, form.norms)
        self.head_norms = self._find(attention, form.head_norms or ())
        self.into, self.out = self._find(attention, form.into), self._find(attention, (form.out,))[0]
        self.mlp_into, self.mlp_out = self._find(mlp, form.mlp_into), self._find(mlp, (form.mlp_out,))[0]
        self.products: list[Any] = [*self.into, self.out, *self.mlp_into, self.mlp_out]
        others = [each for each in (*attention._modules.values(), *mlp._modules.values()) if each is not None]
        called = [attention, mlp, *self.norms, *self.head_norms, *self.products, *others]
        self._called, self._classes = called, list(map(type, called))
        self._hooks = [hooks for module in called for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [module.__dict__ for module in called]
        self._numbers = list(map(len, self._attributes))
        self._has_own_forward = any("forward" in attributes for attributes in self._attributes)
        owners = [(m._parameters, n) for m in (*self.norms, *self.head_norms, *self.products) for n in m._parameters]
        self._places += owners
        self._at, self._names = (list(each) for each in zip(*self._places, strict=True))
        self._found = list(map(dict.get, self._at, self._names))
        self._parameters: list[Tensor] = [p[n] for p, n in owners if p[n] is not None]
        narrow = [product for product in self.products if isinstance(product, NarrowProduct)]
        self._narrow = [product.weight for product in narrow if not product.weight.is_inference()]
        self._versions = [product.made_from[1] for product in narrow if not product.weight.is_inference()]
        self.is_current = all(product.is_current() for product in narrow)

    def _find(self, parent: nn.Module, names: tuple[str, ...]) -> list[Any]:
        self._places += [(parent._modules, name) for name in names]
        return [parent._modules[name] for name in names]

    def are_in_place(self) -> bool:
        """Return whether the block still has these layers and parameters, and no new attribute such as ``forward``."""
        return (
            all(map(operator.is_, map(dict.get, self._at, self._names), self._found))
            and list(map(type, self._called)) == self._classes
            and list(map(len, self._attributes)) == self._numbers
            and list(map(_version, self._narrow)) == self._versions
        )

    def are_seen(self) -> bool:
        """Return whether one of the layers has a hook or an instance attribute ``forward``."""
        return self._has_own_forward or any(self._hooks)

    def addresses(self) -> list[int]:
        """Return the addresses of the parameters."""
        return list(map(Tensor.data_ptr, self._parameters))


_version = operator.attrgetter("_version")


def block_of(layers: BlockLayers, activation: str) -> Block | None:
    """Return the block for the kernel, or ``None`` if the kernel does not support it."""
    norms = [_norm_of(norm) for norm in (*layers.norms, *layers.head_norms)]
    into, mlp_into = [_layer_of(layer) for layer in layers.into], [_layer_of(layer) for layer in layers.mlp_into]
    out, mlp_out = _layer_of(layers.out), _layer_of(layers.mlp_out)
    if not all((*norms, *into, *mlp_into, out, mlp_out)):
        return None
    width = layers.attention.head_dim
    outputs = [layer.shape[0] // width for layer in into]
    heads, groups, _ = outputs if len(into) == 3 else [outputs[0] // 3] * 3
    is_sum = [type(layer).forward is _ROW and layer.tp.size > 1 for layer in (layers.out, layers.mlp_out)]
    made = Block(
        norms=(norms[0], norms[1]),
        head_norms=(norms[2], norms[3]) if layers.head_norms else None,
        into=into,
        out=out,
        mlp_into=mlp_into,
        mlp_out=mlp_out,
        heads=heads,
        groups=groups,
        width=width,
        activation=activation,
        sums=all(is_sum),
    )
    share = getattr(layers.attention, "num_key_value_groups", 1)
    return made if is_sum[0] == is_sum[1] and made.is_supported() and heads == groups * share else None


def _norm_of(norm: Any) -> Any:
    """Return the norm for the kernel, or ``None``."""
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    if weight is None or not _is_dense(weight) or (bias is not None and not _is_dense(bias)):
        return None
    if isinstance(norm, CPURMSNorm) and type(norm).forward in (CPURMSNorm.forward, HeadParallelNorm.forward):
        return NormWeights(weight, None, norm.variance_epsilon, norm.offset, False)
    if type(norm) is nn.LayerNorm:
        return NormWeights(weight, bias, norm.eps, 0.0, True)
    return None


def _layer_of(layer: Any) -> Any:
    """Return the linear layer for the kernel, or ``None``."""
    if type(layer).forward not in LINEAR_FORWARDS or getattr(layer, "returns_partial_sums", False):
        return None
    bias = layer._parameters.get("bias")
    if bias is not None and not _is_dense(bias):
        return None
    if isinstance(layer, NarrowProduct):
        return LinearWeights(layer.narrow.values, bias, layer.narrow.scale)
    weight = layer._parameters.get("weight")
    if weight is None or not _is_dense(weight):
        return None
    return LinearWeights(weight, bias, None, isinstance(layer, Conv1D))


def _is_dense(parameter: Any) -> bool:
    kind = type(parameter)
    plain = kind is nn.Parameter or getattr(kind, "has_plain_storage", False)
    return plain and parameter.dtype is torch.float32 and parameter.is_cpu and parameter.is_contiguous()
