"""Inkling, its text model: Llama with shared and routed experts, short convolutions, and biases of relative positions.

Blocks with sliding windows may have other heads. Each head mixes its biases from profiles that all heads share. The
convolutions over hidden states, after attention and after the experts, are replicated. So are the routers, which weigh
shared and routed experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import InklingTextConfig
from transformers.models.inkling import modeling_inkling as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    Experts,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    SummedModule,
)
from oslo_models.layers.kinds import shards
from oslo_models.layers.state_space import FilteredModule
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads

FILTERED = ("self_attn.k_sconv", "self_attn.v_sconv")
"""Convolutions of keys and values."""
NORM = "embed_tokens.embed_norm" if hasattr(hf, "InklingNormedEmbedding") else "embed_norm"
"""The norm of the embeddings, which transformers moved into their module after 5.17."""


@dataclass(frozen=True)
class ShortConvolution(LocalAttributes):
    """Module that reads the filters of its depthwise convolution and applies them to a sharded activation directly.

    Args:
        attributes: see `LocalAttributes`.
        convolution: name of the convolution. Its parameters have separate entries.
    """

    convolution: str = "conv1d"


@shards(ShortConvolution)
class ShortConvolutionLayer(FilteredModule):
    """Convolution whose module applies the filters to the channels of its local heads."""


class InklingParallel(LlamaParallel):
    """Sharding plan of the text models of the Inkling family.

    Attributes:
        replicated: modules of a block, besides norms, that read or return whole hidden states.
    """

    head_norms: ClassVar[tuple[str, ...]] = ("self_attn.q_norm", "self_attn.k_norm")
    mlp: ClassVar[Entries] = {
        **LlamaParallel.mlp,
        "mlp.global_scale": Replicated(),
        "mlp.gate": Replicated(),
        "mlp.experts": Experts(shared="shared_experts"),
        "mlp.shared_experts": SummedModule(),
        "mlp.shared_experts.gate_proj": ColumnParallel(dim=1),  # matrices of all shared experts
        "mlp.shared_experts.up_proj": ColumnParallel(dim=1),
        "mlp.shared_experts.down_proj": ColumnParallel(dim=2),
    }
    replicated: ClassVar[tuple[str, ...]] = ("attn_sconv", "mlp_sconv")
    optional: ClassVar[tuple[str, ...]] = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {
            **super().attention(config, heads),
            "self_attn.r_proj": ColumnParallel(replace(heads, head_dim=config.d_rel).query),
            "self_attn.rel_logits_proj": LocalAttributes(shared=("proj",)),
            "self_attn.rel_logits_proj.proj": Replicated(),
            **dict.fromkeys(FILTERED, ShortConvolution()),
            **{f"{name}.conv1d.weight": ColumnParallel(heads.key_value) for name in FILTERED},
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = GroupedHeads(config.swa_num_attention_heads, config.swa_num_key_value_heads, config.swa_head_dim)
        sliding = cls.attention(config, heads)
        whole = dict.fromkeys(cls.replicated, Replicated())
        return replace(
            plan,
            embed={**plan.embed, NORM: Norm()},
            blocks={"layers": {**plan.blocks["layers"], **whole}},
            block_overrides={"layers": [sliding if kind == "hybrid_sliding" else {} for kind in config.layer_types]},
        )


class InklingTextModel(InklingParallel, hf.InklingTextModel):
    pass


class InklingForCausalLM(InklingParallel, hf.InklingForCausalLM):
    head_plan = LM_HEAD
