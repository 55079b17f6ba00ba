"""Attention layers of transformers with rotary positions. `rules` mixes them into the classes of layers.

Under ``torch.compile`` a layer runs transformers' code, and single queries attend by groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oslo_kernels import passes, small_operations
from oslo_kernels.rotary import rotary
from oslo_kernels.small_operations import computes
from oslo_models.cache_argument import take_cache, update_cache
from oslo_models.fusion.attention import FusedEagerAttention, fused_eager_attention
from oslo_models.fusion.decode_attention import DecodingAttention
from oslo_models.fusion.full_norms import FullNorms
from oslo_models.fusion.grouped_attention import grouped_when_decoding
from oslo_models.fusion.known_layers import ROTARY_ATTENTIONS
from oslo_models.fusion.norms import norm_and_rotate
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply Llama's rotary position embedding to queries and keys, in one launch if the kernel supports the inputs.

    Args:
        query, key: ``[batch, heads, length, width]``.
        cos, sin: ``[batch or 1, length, turned]``. The elements of a head after the first ``turned`` are copied. The
            tables may have a wider dtype (OLMo 2; under autocast). The results have the dtype of queries and keys.
    """
    turned = cos.shape[-1]
    constant = not (cos.requires_grad or sin.requires_grad)
    if constant and cos.dim() == 3 and query.dtype == key.dtype and turned % 2 == 0:
        return rotary(query, key, cos, sin)
    return rotate_in_torch(query, key, cos, sin)


def rotate_in_torch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate` in plain torch."""
    turned, made = cos.shape[-1], []
    for x in (query, key):
        h, rest = x[..., :turned], x[..., turned:]
        half = torch.cat((-h[..., turned // 2 :], h[..., : turned // 2]), -1)
        result = (h * cos.unsqueeze(1) + half * sin.unsqueeze(1)).to(x.dtype)
        made.append(torch.cat((result, rest), -1) if rest.shape[-1] else result)
    return made[0], made[1]


class FusedLlamaAttention(FusedEagerAttention):
    """The attention of Llama and its copies, with one launch for the positions of queries and keys.

    Layers that differ from Llama's override one of the methods. See `known_layers.ROTARY_ATTENTIONS`.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    head_dim: int
    layer_idx: int
    scaling: float
    attention_dropout: float

    @property
    def config(self) -> Any:
        """Return the layer's config, or a view of it that selects another attention function."""
        if torch.compiler.is_compiling():
            return grouped_when_decoding(self.own_config)
        return super().config

    def is_supported(self) -> bool:
        """Return whether `attend` supports this layer."""
        return True

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, ``[batch, length, heads * width]``."""
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, ``[batch, heads, length, width]``, with positions."""
        return self.rotated(query, key, cos, sin)

    def rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys, without norms."""
        return rotate(query, key, cos, sin)

    def options(self) -> dict[str, Any]:
        """Return this layer's additional arguments for the attention function."""
        return {}

    def output(self, attended: Tensor) -> Tensor:
        """Apply the output projection."""
        return self.o_proj(attended)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        # the order of arguments differs between layers
        if torch.compiler.is_compiling() or args or not self.is_supported():
            return super().forward(hidden_states, *args, **kwargs)
        return self.attend(hidden_states, take_cache(super().forward, kwargs), **kwargs)

    def attend(
        self,
        hidden_states: Tensor,
        cached: Any,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the fused forward. Return the output, and the weights if the attention function returns them."""
        shape = hidden_states.shape[:-1]
        query, key, value = (x.view(*shape, -1, self.head_dim) for x in self.projected(hidden_states))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        query, key = self.positioned(query, key, *position_embeddings)
        if cached is not None:
            key, value = update_cache(cached, key, value, self.layer_idx, kwargs)
        interface: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, fused_eager_attention
        )
        options = {"dropout": self.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        attended, weights = interface(self, query, key, value, attention_mask, **options, **self.options(), **kwargs)
        return self.output(attended.reshape(*shape, -1).contiguous()), weights


class FusedQwen2Attention(FusedLlamaAttention):
    """`FusedLlamaAttention` with the layer's sliding window."""

    sliding_window: int | None

    def options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class FusedQwen3Attention(FusedQwen2Attention):
    """`FusedQwen2Attention` with norms of heads before the positions."""

    q_norm: nn.Module
    k_norm: nn.Module

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, ``[batch, heads, length, width]``, after the norms of heads."""
        query, key = self.q_norm(query.transpose(1, 2)), self.k_norm(key.transpose(1, 2))
        return query.transpose(1, 2), key.transpose(1, 2)

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        both = norm_and_rotate((self.q_norm, self.k_norm), query, key, cos, sin)
        return both or super().positioned(*self.normed(query, key), cos, sin)


class FusedExaone4Attention(FusedQwen3Attention):
    """`FusedQwen3Attention`. In models with sliding and full attention, full-attention layers have no positions."""

    is_sliding: bool

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.sliding_window is None or self.is_sliding:
            return super().positioned(query, key, cos, sin)
        return self.normed(query, key)

    def options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window if self.is_sliding else None}


class FusedSmolLM3Attention(FusedQwen2Attention):
    """`FusedQwen2Attention` with positions in some layers only."""

    use_rope: bool

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().positioned(query, key, cos, sin) if self.use_rope else (query, key)


class FusedGemma2Attention(FusedQwen2Attention):
    """`FusedQwen2Attention` with scores capped by tanh."""

    attn_logit_softcapping: float | None

    def options(self) -> dict[str, Any]:
        return {**super().options(), "softcap": self.attn_logit_softcapping}


class FusedMistralAttention(FusedLlamaAttention):
    """`FusedLlamaAttention` with the model's sliding window."""

    def options(self) -> dict[str, Any]:
        return {"sliding_window": getattr(self.config, "sliding_window", None)}


class FusedOlmo2Attention(FusedLlamaAttention):
    """`FusedLlamaAttention` with norms over all heads before the positions.

    Attributes:
        full_norms: the parameters of the norms, or ``None`` if they are unsupported.
    """

    q_norm: nn.Module
    k_norm: nn.Module
    full_norms: FullNorms | None = None

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        norms = (self.q_norm, self.k_norm)
        both = None if self.full_norms is None else self.full_norms.and_rotate(norms, query, key, cos, sin)
        if both is not None:
            return both
        of_heads = (query.transpose(1, 2), key.transpose(1, 2))
        query, key = (norm(x.flatten(2)).view(x.shape) for norm, x in zip(norms, of_heads, strict=True))
        return super().positioned(query.transpose(1, 2), key.transpose(1, 2), cos, sin)


class FusedOlmo3Attention(FusedOlmo2Attention):
    """`FusedOlmo2Attention` with the layer's sliding window."""

    sliding_window: int | None

    def options(self) -> dict[str, Any]:
        return {"sliding_window": self.sliding_window}


class FusedPhi3Attention(FusedMistralAttention):
    """`FusedMistralAttention` with one projection to queries, keys and values."""

    qkv_proj: nn.Module
    num_key_value_heads: int

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed, width = self.qkv_proj(hidden_states), self.num_key_value_heads * self.head_dim
        query, key, value = packed.split([packed.shape[-1] - 2 * width, width, width], -1)
        return query, key, value


class FusedGPTNeoXAttention(FusedLlamaAttention):
    """`FusedLlamaAttention` with query, key and value of each head adjacent, and with GPT-NeoX's names."""

    query_key_value: nn.Module
    dense: nn.Module
    head_size: int

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """The width of a head."""
        return self.head_size

    def projected(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.query_key_value(hidden_states)
        query, key, value = packed.view(*packed.shape[:-1], -1, 3 * self.head_size).chunk(3, -1)
        return query, key, value

    def output(self, attended: Tensor) -> Tensor:
        return self.dense(attended)


class FusedStarcoder2Attention(FusedMistralAttention):
    """`FusedMistralAttention` with dropout of the output."""

    residual_dropout: float

    def output(self, attended: Tensor) -> Tensor:
        return F.dropout(self.o_proj(attended), self.residual_dropout, self.training)


class FusedSeedOssAttention(FusedLlamaAttention):
    """`FusedLlamaAttention` with dropout of the output."""

    residual_dropout: float

    def output(self, attended: Tensor) -> Tensor:
        return F.dropout(self.o_proj(attended), self.residual_dropout, self.training)


class FusedHunYuanAttention(FusedLlamaAttention):
    """`FusedLlamaAttention` with norms of heads after the positions."""

    query_layernorm: nn.Module
    key_layernorm: nn.Module

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().positioned(query, key, cos, sin)
        return self.query_layernorm(query), self.key_layernorm(key)


class FusedPartialRotaryAttention(FusedLlamaAttention):
    """`FusedLlamaAttention` with positions in the first part of each head, and optional norms of heads before."""

    qk_layernorm: bool
    q_layernorm: nn.Module
    k_layernorm: nn.Module
    rotary_ndims: int

    def is_supported(self) -> bool:
        return self.rotary_ndims % 2 == 0  # otherwise the tables are wider than the rotated part

    def positioned(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return super().positioned(query, key, cos, sin)


class FusedPhiAttention(FusedPartialRotaryAttention):
    """Phi's name for the output projection."""

    dense: nn.Module

    def output(self, attended: Tensor) -> Tensor:
        return self.dense(attended)


class CPURotaryAttention(DecodingAttention, FusedLlamaAttention):
    """A mixin before one of these layers on a CPU: one-pass rotation, and one call for few tokens without gradients."""

    def is_supported(self) -> bool:
        return self.own_config._attn_implementation in TORCH_ATTENTION and super().is_supported()

    def rotated(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        usual = cos.dim() == 3 and cos.shape[-1] % 2 == 0 and not (cos.requires_grad or sin.requires_grad)
        dense = query.stride(-1) == key.stride(-1) == 1 and cos.is_contiguous() and sin.is_contiguous()
        if usual and dense and computes(query, cos) and computes(key, sin):
            return small_operations.rotate(query, key, cos, sin)
        if usual and passes.computes(query, key, cos, sin):
            return passes.rotate(query, key, cos, sin)
        return rotate_in_torch(query, key, cos, sin)


_BY_ORIGINAL: dict[str, type] = {
    "exaone4.Exaone4Attention": FusedExaone4Attention,
    "gemma2.Gemma2Attention": FusedGemma2Attention,
    "gemma3.Gemma3Attention": FusedQwen3Attention,
    "gpt_neox.GPTNeoXAttention": FusedGPTNeoXAttention,
    "hunyuan_v1_dense.HunYuanDenseV1Attention": FusedHunYuanAttention,
    "llama.LlamaAttention": FusedLlamaAttention,
    "mistral.MistralAttention": FusedMistralAttention,
    "olmo2.Olmo2Attention": FusedOlmo2Attention,
    "olmo3.Olmo3Attention": FusedOlmo3Attention,
    "phi.PhiAttention": FusedPhiAttention,
    "phi3.Phi3Attention": FusedPhi3Attention,
    "qwen2.Qwen2Attention": FusedQwen2Attention,
    "qwen3.Qwen3Attention": FusedQwen3Attention,
    "seed_oss.SeedOssAttention": FusedSeedOssAttention,
    "smollm3.SmolLM3Attention": FusedSmolLM3Attention,
    "stablelm.StableLmAttention": FusedPartialRotaryAttention,
    "starcoder2.Starcoder2Attention": FusedStarcoder2Attention,
}
ROTARY_CLASSES = {copy: _BY_ORIGINAL[original] for original, copies in ROTARY_ATTENTIONS.items() for copy in copies}
"""The fused form of each layer in `known_layers.ROTARY_ATTENTIONS`."""
