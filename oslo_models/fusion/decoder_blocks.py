"""Blocks of decoders on a CPU whose tokens are computed in C++, one per row, without gradients.

`oslo_kernels.decoder_block` computes a block in two calls, with the update of the cache in between. It is used for the
numbers of rows for which `block_timing` has found it faster. For everything else a block computes as before: with
gradients, for other dtypes, for more tokens, with hooks on layers inside, and where one of them was replaced.

Legend:
    B: rows, of one token each.
    N: the width of the hidden states.
    H: heads of this rank.
    G: its key-value heads.
    L: keys.
    D: size of a head.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch
from transformers.pytorch_utils import Conv1D

from oslo_kernels import decode_attention, decoder_block, linear
from oslo_kernels.decoder_block import Block, Layer, Norm
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.shared_memory import shared_memory_of
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.decode_attention import decoding_attention
from oslo_models.fusion.known_layers import layer_name
from oslo_models.fusion.modules import FusedConv1D, FusedLinear
from oslo_models.fusion.narrow_weights import NarrowProduct
from oslo_models.fusion.norms import SmallRMSNorm
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

_ROW = RowParallelLinear.forward  # that of RowParallelConv1D too
_LINEAR = (
    *(nn.Linear.forward, FusedLinear.forward, Conv1D.forward, FusedConv1D.forward),
    *(ColumnParallelLinear.forward, KeyValueParallelLinear.forward, _ROW),
)
"""The methods of linear layers that do nothing but a product, a sum over ranks, and the addition of a bias."""


@dataclass(frozen=True)
class BlockForm:
    """The names of the layers in a class of blocks.

    Attributes:
        norms: before the attention and before the MLP.
        into: from hidden states to queries, keys and values, in the attention.
        head_norms: of queries and keys, in the attention.
        rotary: whether queries and keys are rotated by their positions.
        mlp_into: from hidden states into the MLP: the gate first, if there is one.
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
    """Where a block of GPT-2 or of a copy of Llama has its layers, if its attention is one that is known."""
    if layer_name(block) == "gpt2.GPT2Block":
        return None if hasattr(block, "crossattention") else GPT2
    attention = block.self_attn
    cls = ROTARY_CLASSES.get(layer_name(attention))
    if cls is FusedSmolLM3Attention:
        return LLAMA if attention.use_rope else SMOLLM3
    return _ROTARY.get(cls)


class _Layers:
    """The layers of a block, as they were found.

    What may change between two tokens is compared by functions that loop in C: it is done for each block and token.

    Attributes:
        products: its linear layers.
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
        self._narrow = [p._parameters["weight"] for p in narrow if not p._parameters["weight"].is_inference()]
        self._versions = [p.made_from[1] for p in narrow if not p._parameters["weight"].is_inference()]
        self.is_current = all(product.is_current() for product in narrow)

    def _find(self, parent: nn.Module, names: tuple[str, ...]) -> list[Any]:
        self._places += [(parent._modules, name) for name in names]
        return [parent._modules[name] for name in names]

    def are_in_place(self) -> bool:
        """Whether the block still has these layers and parameters, and no new attribute such as a ``forward``."""
        return (
            all(map(operator.is_, map(dict.get, self._at, self._names), self._found))
            and list(map(type, self._called)) == self._classes
            and list(map(len, self._attributes)) == self._numbers
            and list(map(_version, self._narrow)) == self._versions
        )

    def are_seen(self) -> bool:
        """Whether a hook, or a forward of its own, has a part in one of the layers."""
        return self._has_own_forward or any(self._hooks)

    def addresses(self) -> list[int]:
        """Of the parameters."""
        return list(map(Tensor.data_ptr, self._parameters))


_version = operator.attrgetter("_version")


class BlockDecoding:
    """Computes one block of a model in C++ where it can.

    Args:
        form: where the block has its layers.
        activation: of its MLP, one of `oslo_kernels.decoder_block.ACTIVATIONS`.
        faster: the numbers of rows for which this is faster, with a number of threads; ``None``: all that it can.
    """

    def __init__(self, form: BlockForm, activation: str, faster: tuple[frozenset[int], int] | None = None) -> None:
        self._form, self._activation, self.faster = form, activation, faster
        self._layers: _Layers | None = None
        self._addresses: list[int] = []
        self._block: Block | None = None
        self._packed = b""
        self._sums: Axis | None = None

    @property
    def has_positions(self) -> bool:
        """Whether the block is given cosines and sines of the positions, used or not."""
        return self._form is not GPT2

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockDecoding:
        return BlockDecoding(*self.__reduce__()[1])

    def __reduce__(self) -> Any:
        return BlockDecoding, (self._form, self._activation, self.faster)

    def __call__(
        self,
        block: nn.Module,
        hidden_B1N: Tensor,
        mask: Tensor | None,
        past_key_values: Any,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:
        """The block's output, or ``None`` if it has to be computed as before.

        Args:
            tables: cosines and sines of the positions.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or past_key_values is None or block.training:
            return None
        if type(hidden_B1N) is not Tensor or not _is_plain(hidden_B1N) or hidden_B1N.shape[1] != 1:
            return None
        if torch.is_autocast_enabled("cpu") or _global_hooks():
            return None
        rows = len(hidden_B1N)
        if self.faster is not None and (rows not in self.faster[0] or torch.get_num_threads() != self.faster[1]):
            return None
        with without_override():
            tables = tables if self._form.rotary else None
            made = self.block(block)
            if made is None or rows > made.most_rows or (tables is not None and not _fit(tables, rows, made.width)):
                return None
            return self._run(made, hidden_B1N, mask, past_key_values, tables)

    def _run(
        self, block: Block, x_B1N: Tensor, mask: Tensor | None, past: Any, tables: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        assert self._layers is not None
        attention, sums = self._layers.attention, self._sums
        rows, heads, groups, width = len(x_B1N), block.heads, block.groups, block.width
        columns = (heads + 2 * groups) * width
        states = x_B1N.new_empty(rows, columns)
        decoder_block.begin(self._packed, x_B1N, states, *(tables or (None, None)))
        query, key, value = (
            states.as_strided((rows, count, 1, width), (columns, width, columns, 1), first * width)
            for count, first in ((heads, 0), (groups, heads), (groups, heads + groups))
        )
        key, value = past.update(key, value, attention.layer_idx)
        given: Any
        if decode_attention.computes(query, key, value, (mask,)):
            attended = x_B1N.new_empty(rows, 1, heads, width)
            shown, added = (mask, None) if mask is not None and mask.dtype is torch.bool else (None, mask)
            given = decode_attention.arguments(query, key, value, attention.scaling, shown, added, attended)
        else:  # such as a cache in another dtype
            given = decoding_attention(attention, query, key, value, mask, scaling=attention.scaling)[0].contiguous()
        memory = None if sums is None else shared_memory_of(sums)
        return decoder_block.finish(self._packed, x_B1N, given, memory, lambda part: all_reduce(sums, part))  # type: ignore[arg-type]

    def block(self, module: nn.Module) -> Block | None:
        """The tensors of a block, if single tokens can be computed here."""
        layers = self._layers
        if layers is None or not layers.are_in_place():
            layers = self._layers = _Layers(module, self._form)
            self._addresses = []
        if layers.are_seen() or not layers.is_current or layers.attention.config._attn_implementation not in _SUPPORTED:
            return None
        addresses = layers.addresses()
        if addresses != self._addresses:
            made = self._block = _block_of(layers, self._activation)
            self._addresses, self._packed = addresses, b"" if made is None else made.packed()
            self._sums = layers.out.tp if made is not None and made.sums else None
        return self._block


_SUPPORTED = ("sdpa", "oslo_models_decoding")


def _global_hooks() -> bool:
    return bool(module_of_torch._global_forward_hooks or module_of_torch._global_forward_pre_hooks)


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 3 and x.is_contiguous()


def _fit(tables: tuple[Tensor, Tensor], rows: int, width: int) -> bool:
    cos, sin = tables
    if cos.shape != sin.shape or not _is_plain(cos) or not _is_plain(sin):
        return False
    return cos.shape[0] in (1, rows) and cos.shape[1] == 1 and cos.shape[2] % 2 == 0 and cos.shape[2] <= width


def _block_of(layers: _Layers, activation: str) -> Block | None:
    """The block as the kernel has it, if it can compute it."""
    norms = [_norm_of(norm) for norm in (*layers.norms, *layers.head_norms)]
    products = [_layer_of(product) for product in layers.products]
    if not all(norms) or not all(products):
        return None
    made: list[Any] = products
    count = len(layers.into)
    into, out, mlp_into, mlp_out = made[:count], made[count], made[count + 1 : -1], made[-1]
    attention: Any = layers.attention
    width = attention.head_dim
    sizes = [layer.shape[0] // width for layer in into] if len(into) == 3 else [into[0].shape[0] // width // 3] * 3
    heads, groups, values = sizes
    whole = [heads * width, groups * width, values * width] if len(into) == 3 else [3 * heads * width]
    fits = [layer.shape[0] for layer in into] == whole and groups == values and groups and heads % groups == 0
    fits = fits and out.shape[1] == heads * width and heads // groups == getattr(attention, "num_key_value_groups", 1)
    fits = fits and len({layer.shape for layer in mlp_into}) == 1 and mlp_out.shape[1] == mlp_into[0].shape[0]
    kinds = [{(layer.kind, layer.io) for layer in together} for together in (into, mlp_into)]
    hidden = norms[0].weight.numel()  # type: ignore[union-attr]
    fits = fits and all(layer.shape[1] == hidden for layer in (*into, *mlp_into)) and all(len(kind) == 1 for kind in kinds)
    if not fits or out.shape[0] != hidden or mlp_out.shape[0] != hidden:
        return None
    if min(min(layer.shape) for layer in made) < linear.FEWEST_OUTPUTS:
        return None
    is_sum = [type(layer).forward is _ROW and layer.tp.size > 1 for layer in (layers.out, layers.mlp_out)]
    if is_sum[0] != is_sum[1]:
        return None
    head_norms: Any = tuple(norms[2:]) or None
    pair: Any = tuple(norms[:2])
    return Block(pair, head_norms, into, out, mlp_into, mlp_out, heads, groups, width, activation, is_sum[0])


def _norm_of(norm: Any) -> Norm | None:
    weight, bias = norm._parameters.get("weight"), norm._parameters.get("bias")
    if weight is None or not _is_dense(weight) or (bias is not None and not _is_dense(bias)):
        return None
    if isinstance(norm, SmallRMSNorm) and type(norm).forward in (SmallRMSNorm.forward, HeadParallelNorm.forward):
        return Norm(weight, None, norm.variance_epsilon, norm.offset, False)
    if type(norm) is nn.LayerNorm:
        return Norm(weight, bias, norm.eps, 0.0, True)
    return None


def _layer_of(layer: Any) -> Layer | None:
    if type(layer).forward not in _LINEAR or getattr(layer, "returns_partial_sums", False):
        return None
    bias = layer._parameters.get("bias")
    if bias is not None and not _is_dense(bias):
        return None
    if isinstance(layer, NarrowProduct):
        return Layer(layer.narrow.values, bias, layer.narrow.scale)
    weight = layer._parameters.get("weight")
    if weight is None or not _is_dense(weight):
        return None
    return Layer(weight, bias, None, isinstance(layer, Conv1D))


def _is_dense(parameter: Any) -> bool:
    kind = type(parameter)
    plain = kind is nn.Parameter or getattr(kind, "has_plain_storage", False)
    return plain and parameter.dtype is torch.float32 and parameter.is_cpu and parameter.is_contiguous()


class DecodingLlamaBlock(nn.Module):
    """A mixin before the block of Llama and of its copies.

    Attributes:
        decoding: computes single tokens.
    """

    decoding: BlockDecoding

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        if position_embeddings is not None and not _asks_more(kwargs):
            found = self.decoding(self, hidden_states, attention_mask, past_key_values, position_embeddings)
            if found is not None:
                return found
        named = {"position_ids": position_ids, "past_key_values": past_key_values, "use_cache": use_cache}
        named |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
        return super().forward(hidden_states, **named, **kwargs)


class DecodingGPT2Block(nn.Module):
    """A mixin before the block of GPT-2.

    Attributes:
        decoding: computes single tokens.
    """

    decoding: BlockDecoding

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if encoder_hidden_states is None and not _asks_more(kwargs):
            found = self.decoding(self, hidden_states, attention_mask, past_key_values)
            if found is not None:
                return found
        encoder = (encoder_hidden_states, encoder_attention_mask)
        return super().forward(hidden_states, past_key_values, attention_mask, *encoder, **kwargs)


_WITHOUT_EFFECT = frozenset(("position_ids", "use_cache", "cache_position"))


def _asks_more(kwargs: dict[str, Any]) -> bool:
    """Whether arguments of a block change what its attention returns or computes."""
    return any(value is not None and value is not False for name, value in kwargs.items() if name not in _WITHOUT_EFFECT)
