"""CPM-Ant: blocks with biases of relative positions and segments, after prompts that it puts before the tokens.

Its labels are not shifted. It has no attention mask, and reads the padding from the token ids.
"""

from __future__ import annotations

from typing import Any

from transformers import CpmAntConfig
from transformers.models.cpmant import modeling_cpmant as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.sharding.layout import EvenSplit


class CpmAntParallel(ParallelModel):
    """Sharding plan of the CPM-Ant family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, attention = EvenSplit(config.num_attention_heads, config.dim_head), "self_att.self_attention"
        return Plan(
            embed={
                "input_embedding": VocabParallel(),
                "segment_embedding": Replicated(),
                "position_bias.relative_attention_bias": ColumnParallel(EvenSplit(heads.count), dim=1),
            },
            blocks={
                "encoder.layers": {
                    "self_att.layernorm_before_attention": Norm(),
                    attention: LocalAttributes({"num_heads": heads.local_count}),
                    **qkv(attention, heads, ("project_q", "project_k", "project_v")),
                    f"{attention}.attention_out": RowParallel(heads),
                    "ffn.layernorm_before_ffn": Norm(),
                    "ffn.ffn.w_in.w_0": ColumnParallel(),
                    "ffn.ffn.w_in.w_1": ColumnParallel(),
                    "ffn.ffn.w_out": RowParallel(),
                }
            },
            head={"encoder.output_layernorm": Norm()},
        ).with_rules(
            single_stage_reason="the output of its blocks is returned without the prompts, which further blocks need"
        )


class CpmAntModel(CpmAntParallel, hf.CpmAntModel):
    pass


class CpmAntForCausalLM(CpmAntParallel, hf.CpmAntForCausalLM):
    head_plan = LM_HEAD
