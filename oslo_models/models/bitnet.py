"""BitNet: Llama with norms before the output projections of attention and MLP."""

from dataclasses import replace
from typing import Any

from transformers import BitNetConfig
from transformers.models.bitnet import modeling_bitnet as hf

from oslo_models.layers.entries import Plan, WidthNorm
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import EvenSplit


class BitNetParallel(LlamaParallel):
    """Sharding plan of the BitNet family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        norms = {
            "self_attn.attn_sub_norm": WidthNorm(cls.heads(config).query),
            "mlp.ffn_sub_norm": WidthNorm(EvenSplit(config.intermediate_size)),
        }
        return replace(plan, blocks={"layers": {**plan.blocks["layers"], **norms}})


class BitNetModel(BitNetParallel, hf.BitNetModel):
    pass


class BitNetForCausalLM(BitNetParallel, hf.BitNetForCausalLM):
    head_plan = LM_HEAD
