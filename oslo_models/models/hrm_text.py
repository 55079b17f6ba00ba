"""HRM: two stacks of Llama blocks with gated attention and norms without weights, which run in turn, several times."""

from dataclasses import replace
from typing import Any

from transformers import HrmTextConfig
from transformers.models.hrm_text import modeling_hrm_text as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class HrmTextParallel(LlamaParallel):
    """Sharding plan of the HRM family."""

    @classmethod
    def heads(cls, config: Any) -> GroupedHeads:
        return GroupedHeads(config.num_attention_heads, config.num_attention_heads, config.head_dim)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.gate_proj": ColumnParallel(heads.query)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(
            plan,
            embed={**plan.embed, "z_L_init": Replicated()},
            blocks=dict.fromkeys(("L_module.layers", "H_module.layers"), plan.blocks["layers"]),
            head={},
        ).with_rules(single_stage_reason="its stacks run in turn, several times")


class HrmTextModel(HrmTextParallel, hf.HrmTextModel):
    pass


class HrmTextForCausalLM(HrmTextParallel, hf.HrmTextForCausalLM):
    head_plan = LM_HEAD
