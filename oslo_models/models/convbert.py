"""ConvBERT: BERT whose attention convolves too, with kernels made from all heads: attention is whole on every rank."""

from dataclasses import replace
from typing import Any

from transformers.models.convbert import modeling_convbert as hf

from oslo_models.models.electra import HEADS, ElectraParallel
from oslo_models.models.family import family, whole_attention
from oslo_models.plan import Plan, Replicated

CONVOLUTION = ("key_conv_attn_layer", "key_conv_attn_layer.depthwise", "key_conv_attn_layer.pointwise")


class ConvBertParallel(ElectraParallel):
    """How every model of the ConvBERT family divides: its MLPs, unless their layers are grouped."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = whole_attention(super().plan(config), (*CONVOLUTION, "conv_kernel_layer", "conv_out_layer"))
        if config.num_groups == 1:
            return plan
        (block,) = plan.blocks.values()
        mlp = {name: Replicated() for name in ("intermediate.dense", "output.dense")}
        return replace(plan, blocks={"encoder.layer": {**block, **mlp}})


globals().update(family(ConvBertParallel, hf, HEADS))
