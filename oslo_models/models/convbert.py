"""ConvBERT: BERT with mixed attention and dynamic convolution, replicated because its kernels need all heads."""

from dataclasses import replace
from typing import Any

from transformers import ConvBertConfig
from transformers.models.convbert import modeling_convbert as hf

from oslo_models.modeling.blocks import replicated_attention
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.electra import LM_HEAD, ElectraParallel
from oslo_models.sharding.plan import Plan, Replicated

CONVOLUTION = ("key_conv_attn_layer", "key_conv_attn_layer.depthwise", "key_conv_attn_layer.pointwise")


class ConvBertParallel(ElectraParallel):
    """Sharding plan of the ConvBERT family: its MLPs are sharded, unless their layers are grouped."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = replicated_attention(super().plan(config), (*CONVOLUTION, "conv_kernel_layer", "conv_out_layer"))
        if config.num_groups == 1:
            return plan
        (block,) = plan.blocks.values()
        mlp = {name: Replicated() for name in ("intermediate.dense", "output.dense")}
        return replace(plan, blocks={"encoder.layer": {**block, **mlp}})


class ConvBertModel(ConvBertParallel, hf.ConvBertModel):
    pass


class ConvBertForMaskedLM(ConvBertParallel, hf.ConvBertForMaskedLM):
    head_plan = LM_HEAD


class ConvBertForSequenceClassification(ConvBertParallel, hf.ConvBertForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class ConvBertForMultipleChoice(ConvBertParallel, hf.ConvBertForMultipleChoice):
    head_plan = {"sequence_summary.summary": Replicated(), "classifier": Replicated()}


class ConvBertForTokenClassification(ConvBertParallel, hf.ConvBertForTokenClassification):
    head_plan = CLASSIFIER


class ConvBertForQuestionAnswering(ConvBertParallel, hf.ConvBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
