"""Dory: Llama with gated attention and norms to length one, also over all heads; middle blocks run several times."""

from dataclasses import replace
from typing import Any

from transformers import DoryConfig
from transformers.models.dory import modeling_dory as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.gemma3n_text import GlobalMoments
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class DoryParallel(LlamaParallel):
    """Sharding plan of the Dory family."""

    norms = ()  # without weights
    mlp = {
        **LlamaParallel.mlp,
        **dict.fromkeys(("mlp.suv_gate", "mlp.suv_up"), ColumnParallel()),
        "mlp.ffn_sub_norm": GlobalMoments(),
        **dict.fromkeys(("lambda_1", "lambda_2"), Replicated()),
    }

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        of_heads = ("self_attn.gate_proj", "self_attn.sqk", "self_attn.s_gate")
        return {
            **super().attention(config, heads),
            **dict.fromkeys(of_heads, ColumnParallel(heads.query)),
            "self_attn.attn_sub_norm": GlobalMoments(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), head={}).with_rules(
            single_stage_reason="its middle blocks run several times"
        )


class DoryModel(DoryParallel, hf.DoryModel):
    pass


class DoryForCausalLM(DoryParallel, hf.DoryForCausalLM):
    head_plan = {**LM_HEAD, "lm_head.logit_scale": Replicated()}
