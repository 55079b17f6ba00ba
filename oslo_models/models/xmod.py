"""X-MOD: RoBERTa with an adapter for each language in each block."""

from dataclasses import replace
from typing import Any

from transformers import XmodConfig
from transformers.models.xmod import modeling_xmod as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, RowParallel
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD


class XmodParallel(BertParallel):
    """Sharding plan of the X-MOD family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        adapters: Entries = {"output.adapter_layer_norm": Norm()}
        for language in config.languages:
            adapter = f"output.adapter_modules.{language}"
            adapters = {**adapters, f"{adapter}.dense1": ColumnParallel(), f"{adapter}.dense2": RowParallel()}
        return replace(
            plan,
            blocks={"encoder.layer": {**plan.blocks["encoder.layer"], **adapters}},
            head={"encoder.LayerNorm": Norm(), **plan.head},
            optional=(*plan.optional, "output.adapter_layer_norm", "encoder.LayerNorm"),
        ).with_rules(single_stage_reason="transformers reads the languages from the first block")


class XmodModel(XmodParallel, hf.XmodModel):
    pass


class XmodForCausalLM(XmodParallel, hf.XmodForCausalLM):
    head_plan = LM_HEAD


class XmodForMaskedLM(XmodParallel, hf.XmodForMaskedLM):
    head_plan = LM_HEAD


class XmodForSequenceClassification(XmodParallel, hf.XmodForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class XmodForMultipleChoice(XmodParallel, hf.XmodForMultipleChoice):
    head_plan = CLASSIFIER


class XmodForTokenClassification(XmodParallel, hf.XmodForTokenClassification):
    head_plan = CLASSIFIER


class XmodForQuestionAnswering(XmodParallel, hf.XmodForQuestionAnswering):
    head_plan = QA_OUTPUTS
