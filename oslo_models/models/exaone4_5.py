"""EXAONE 4.5: the encoder of Qwen2.5-VL, with heads that share keys and values, and EXAONE 4."""

from dataclasses import replace
from typing import Any

from transformers import Exaone4_5_Config, Exaone4_5_VisionConfig
from transformers.models.exaone4_5 import modeling_exaone4_5 as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Plan, RowParallel
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen2_vl import QwenEncoderParallel, QwenWithImagesParallel
from oslo_models.sharding.layout import GroupedHeads


class Exaone4_5_VisionModel(QwenEncoderParallel, hf.Exaone4_5_VisionModel):
    mlp = gated_mlp("mlp")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, head_dim = super().plan(config), config.hidden_size // config.num_heads
        heads = GroupedHeads(config.num_heads, config.num_key_value_heads, head_dim)
        local = {
            "num_key_value_groups": heads.local_ratio,
            "q_dim": heads.query.local_extent,
            "kv_dim": heads.key_value.local_extent,
        }
        attention = {
            "attn": LocalAttributes(local),
            "attn.qkv": ColumnParallel(heads.query, heads.key_value, heads.key_value),
            "attn.proj": RowParallel(heads.query),
        }
        return replace(plan, blocks={"blocks": {**plan.blocks["blocks"], **attention}})


class Exaone4_5_Parallel(QwenWithImagesParallel):
    """Sharding plan of the EXAONE 4.5 family."""

    classes = {"visual": Exaone4_5_VisionModel}


class Exaone4_5_Model(Exaone4_5_Parallel, hf.Exaone4_5_Model):
    pass


class Exaone4_5_ForConditionalGeneration(Exaone4_5_Parallel, hf.Exaone4_5_ForConditionalGeneration):
    head_plan = LM_HEAD
