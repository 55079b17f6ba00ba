"""LongT5: T5 with windows of attention in the encoder, and optionally with sums of blocks of tokens as global keys."""

from dataclasses import replace
from typing import Any

from transformers import LongT5Config
from transformers.models.longt5 import modeling_longt5 as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.t5 import T5Parallel
from oslo_models.sharding.layout import EvenSplit


class LongT5Parallel(T5Parallel):
    """Sharding plan of the LongT5 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), EvenSplit(config.num_heads, config.d_kv)
        shared, bias = "layer.0.SelfAttention", "relative_attention_bias"
        kind = "Local" if config.encoder_attention_type == "local" else "TransientGlobal"
        own = f"layer.0.{kind}SelfAttention"
        block = {key.replace(shared, own): entry for key, entry in plan.blocks["encoder.block"].items()}
        block |= {own: LocalAttributes({"n_heads": heads.local_count, "inner_dim": heads.local_extent})}
        if kind == "TransientGlobal":
            block |= {f"{own}.global_{bias}": block[f"{own}.{bias}"], f"{own}.global_input_layer_norm": Norm()}
        biases = (f"{own}.{bias}", f"{own}.global_{bias}", f"{shared}.{bias}")
        return replace(
            plan, blocks={**plan.blocks, "encoder.block": block}, optional=(*plan.optional, *biases)
        ).with_rules(copied_from_first_block=biases)


class LongT5Model(LongT5Parallel, hf.LongT5Model):
    pass


class LongT5ForConditionalGeneration(LongT5Parallel, hf.LongT5ForConditionalGeneration):
    head_plan = LM_HEAD


class LongT5EncoderModel(LongT5Parallel, hf.LongT5EncoderModel):
    stacks = ("encoder",)
