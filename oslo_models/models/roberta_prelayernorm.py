"""RoBERTa with pre-layer norms."""

from dataclasses import replace
from typing import Any

from transformers import RobertaPreLayerNormConfig
from transformers.models.roberta_prelayernorm import modeling_roberta_prelayernorm as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.plan import Norm, Plan


class RobertaPreLayerNormParallel(BertParallel):
    """Sharding plan of the RoBERTa-PreLayerNorm family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        entries = {name: entry for name, entry in plan.blocks["encoder.layer"].items() if "LayerNorm" not in name}
        attentions = [name.removesuffix(".self") for name in entries if name.endswith(".self")]
        norms = {"intermediate.LayerNorm": Norm(), **{f"{name}.LayerNorm": Norm() for name in attentions}}
        blocks = {"encoder.layer": {**entries, **norms}}
        return replace(plan, blocks=blocks, head={"LayerNorm": Norm(), **plan.head})


class RobertaPreLayerNormModel(RobertaPreLayerNormParallel, hf.RobertaPreLayerNormModel):
    pass


class RobertaPreLayerNormForCausalLM(RobertaPreLayerNormParallel, hf.RobertaPreLayerNormForCausalLM):
    head_plan = LM_HEAD


class RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormParallel, hf.RobertaPreLayerNormForMaskedLM):
    head_plan = LM_HEAD


class RobertaPreLayerNormForSequenceClassification(
    RobertaPreLayerNormParallel, hf.RobertaPreLayerNormForSequenceClassification
):
    head_plan = DENSE_CLASSIFIER


class RobertaPreLayerNormForMultipleChoice(RobertaPreLayerNormParallel, hf.RobertaPreLayerNormForMultipleChoice):
    head_plan = CLASSIFIER


class RobertaPreLayerNormForTokenClassification(
    RobertaPreLayerNormParallel, hf.RobertaPreLayerNormForTokenClassification
):
    head_plan = CLASSIFIER


class RobertaPreLayerNormForQuestionAnswering(RobertaPreLayerNormParallel, hf.RobertaPreLayerNormForQuestionAnswering):
    head_plan = QA_OUTPUTS
