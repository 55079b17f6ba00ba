"""Inkling 2, its text model: Inkling with gated attention, sinks, and residuals that attend to earlier blocks.

Blocks without a sliding window compute new filters of keys and values for each token. Residuals are replicated, because
they read whole hidden states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import Inkling2TextConfig
from transformers.models.inkling2 import modeling_inkling2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Plan, Replicated
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.inkling_text import FILTERED, InklingParallel
from oslo_models.sharding.layout import GroupedHeads

_NESTED = {
    **{f"self_attn.{name}_proj": f"self_attn.{name}_proj.linear" for name in "qkvo"},
    **{f"self_attn.{name}_sconv": f"self_attn.{name}_proj.sconv" for name in "kv"},
    "self_attn.gate_proj": "self_attn.o_proj.gate_proj",
    "self_attn.q_l2_clip": "self_attn.q_proj.norm",
    "self_attn.r_proj": "self_attn.relative_position_bias.linear",
    "self_attn.rel_l2_clip": "self_attn.relative_position_bias.norm",
    "self_attn.rel_logits_proj": "self_attn.relative_position_bias",
    "self_attn.v_norm": "self_attn.v_proj.norm",
}
"""Module names in attention since transformers 5.24, which moved some layers into others."""
if not hasattr(hf, "Inkling2QueryProjection"):
    _NESTED = {}


def _placed(name: str) -> str:
    """Return the name of a layer or parameter of a block in the installed transformers."""
    module = ".".join(name.split(".")[:2])
    return _NESTED.get(module, module) + name.removeprefix(module)


class Inkling2Parallel(InklingParallel):
    """Sharding plan of the text models of the Inkling 2 family."""

    norms = (*InklingParallel.norms, *(f"{name}_input_layernorm" for name in "qkv"))
    head_norms = (_placed("self_attn.v_norm"),)
    mlp = mixture_of_experts()
    replicated: ClassVar[tuple[str, ...]] = (
        "post_attention_convolution",
        "post_mlp_convolution",
        "attention_input",
        "mlp_input",
    )
    optional: ClassVar[tuple[str, ...]] = ("input_layernorm", "attention_input", "sconv.conv1d.weight")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        of_heads = ColumnParallel(replace(heads, head_dim=1).query)
        entries = {
            **super().attention(config, heads),
            "self_attn.gate_proj": ColumnParallel(heads.query),
            "self_attn.rel_logits_proj": LocalAttributes({"num_heads": heads.query.local_count}, shared=("proj",)),
            "self_attn.sink_proj": of_heads,
            "self_attn.q_l2_clip.scale": of_heads,
            "self_attn.rel_l2_clip.scale": of_heads,
        }
        return {_placed(name): entry for name, entry in entries.items()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), cls.heads(config)
        taps = replace(heads, head_dim=config.conv_kernel_size)
        made: Entries = {
            **dict.fromkeys(FILTERED, LocalAttributes({"num_heads": heads.key_value.local_count})),
            **{f"{name}.static_weight": ColumnParallel(heads.key_value, dim=1) for name in FILTERED},
            **{f"{name}.weight_proj": ColumnParallel(taps.key_value) for name in FILTERED},
        }
        dynamic = {_placed(name): entry for name, entry in made.items()}
        return replace(
            plan,
            head={**plan.head, "final_input": Replicated()},
            block_overrides={"layers": [sliding or dynamic for sliding in plan.block_overrides["layers"]]},
        ).with_rules(single_stage_reason="blocks attend to sums of the outputs of earlier blocks")


class Inkling2TextModel(Inkling2Parallel, hf.Inkling2TextModel):
    pass


class Inkling2ForCausalLM(Inkling2Parallel, hf.Inkling2ForCausalLM):
    head_plan = LM_HEAD
