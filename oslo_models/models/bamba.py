"""Bamba: Llama with Mamba-2 mixers in place of attention in most blocks."""

from dataclasses import replace
from typing import Any

from transformers import BambaConfig
from transformers.models.bamba import modeling_bamba as hf

from oslo_models.modeling.blocks import gated_mlp, state_space
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries, Norm, Plan


class BambaParallel(LlamaParallel):
    """Sharding plan of the Bamba family."""

    norms = ("input_layernorm", "pre_ff_layernorm")
    mlp = gated_mlp("feed_forward")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), **cls.mixer(config)}

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        """Return the plan entries of a state-space mixer."""
        heads = GroupedHeads(config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_head)
        return state_space("mamba", heads, config.mamba_d_state)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        either = tuple(cls.attention(config, cls.heads(config)))
        return replace(super().plan(config), head={"final_layernorm": Norm()}, optional=(*cls.optional, *either))


class BambaModel(BambaParallel, hf.BambaModel):
    pass


class BambaForCausalLM(BambaParallel, hf.BambaForCausalLM):
    head_plan = LM_HEAD
