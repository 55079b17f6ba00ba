"""PEGASUS-X: Pegasus with windows of attention and global tokens in the encoder."""

from dataclasses import replace
from typing import Any

from transformers import PegasusXConfig
from transformers.models.pegasus_x import modeling_pegasus_x as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class PegasusXParallel(BartParallel):
    """Sharding plan of the PEGASUS-X family."""

    embedding_norms = ()
    final_norms = ("layer_norm",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), cls.heads(config, "encoder")
        windows = {
            "self_attn": LocalAttributes({"num_heads": heads.local_count}, width=heads),
            "global_self_attn_layer_norm": Norm(),
        }
        return replace(
            plan,
            embed={**plan.embed, "encoder.embed_global": Replicated()},
            blocks={**plan.blocks, "encoder.layers": {**plan.blocks["encoder.layers"], **windows}},
            optional=(*plan.optional, "embed_positions"),  # computed, without parameters
        ).with_rules(single_stage_reason="its encoder passes on global tokens beside hidden states")


class PegasusXModel(PegasusXParallel, hf.PegasusXModel):
    pass


class PegasusXForConditionalGeneration(PegasusXParallel, hf.PegasusXForConditionalGeneration):
    head_plan = LM_HEAD
