"""XLM-RoBERTa XL: XLM-RoBERTa with pre-layer norms."""

from dataclasses import replace
from typing import Any

from transformers import XLMRobertaXLConfig
from transformers.models.xlm_roberta_xl import modeling_xlm_roberta_xl as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.plan import Norm, Plan


class XLMRobertaXLParallel(BertParallel):
    """Sharding plan of the XLM-RoBERTa XL family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        entries = {name: entry for name, entry in plan.blocks["encoder.layer"].items() if "LayerNorm" not in name}
        attentions = [name.removesuffix(".self") for name in entries if name.endswith(".self")]
        norms = {"LayerNorm": Norm(), **{f"{name}.self_attn_layer_norm": Norm() for name in attentions}}
        return replace(
            plan,
            embed={name: entry for name, entry in plan.embed.items() if "LayerNorm" not in name},
            blocks={"encoder.layer": {**entries, **norms}},
            head={"encoder.LayerNorm": Norm(), **plan.head},
        )


class XLMRobertaXLModel(XLMRobertaXLParallel, hf.XLMRobertaXLModel):
    pass


class XLMRobertaXLForCausalLM(XLMRobertaXLParallel, hf.XLMRobertaXLForCausalLM):
    head_plan = LM_HEAD


class XLMRobertaXLForMaskedLM(XLMRobertaXLParallel, hf.XLMRobertaXLForMaskedLM):
    head_plan = LM_HEAD


class XLMRobertaXLForSequenceClassification(XLMRobertaXLParallel, hf.XLMRobertaXLForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class XLMRobertaXLForMultipleChoice(XLMRobertaXLParallel, hf.XLMRobertaXLForMultipleChoice):
    head_plan = CLASSIFIER


class XLMRobertaXLForTokenClassification(XLMRobertaXLParallel, hf.XLMRobertaXLForTokenClassification):
    head_plan = CLASSIFIER


class XLMRobertaXLForQuestionAnswering(XLMRobertaXLParallel, hf.XLMRobertaXLForQuestionAnswering):
    head_plan = QA_OUTPUTS
