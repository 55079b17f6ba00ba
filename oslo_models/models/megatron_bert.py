"""Megatron-BERT: BERT with pre-layer norms."""

from dataclasses import replace
from typing import Any

from transformers import MegatronBertConfig
from transformers.models.megatron_bert import modeling_megatron_bert as hf

from oslo_models.layers.entries import Entries, Norm, Plan, Replicated
from oslo_models.modeling.heads import QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel

CLASSIFIER: Entries = {"classifier": Replicated()}


class MegatronBertParallel(BertParallel):
    """Sharding plan of the Megatron-BERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        norms = {name.replace("output.LayerNorm", "ln") for name in block if name.endswith("LayerNorm")}
        layers = {name: entry for name, entry in block.items() if not name.endswith("LayerNorm")}
        embed = {name: entry for name, entry in plan.embed.items() if not name.endswith("LayerNorm")}
        blocks = {"encoder.layer": {**layers, **{name: Norm() for name in norms}}}
        return replace(plan, embed=embed, blocks=blocks, head={"encoder.ln": Norm(), **plan.head})


class MegatronBertModel(MegatronBertParallel, hf.MegatronBertModel):
    pass


class MegatronBertForPreTraining(MegatronBertParallel, hf.MegatronBertForPreTraining):
    head_plan = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class MegatronBertForCausalLM(MegatronBertParallel, hf.MegatronBertForCausalLM):
    head_plan = LM_HEAD


class MegatronBertForMaskedLM(MegatronBertParallel, hf.MegatronBertForMaskedLM):
    head_plan = LM_HEAD


class MegatronBertForNextSentencePrediction(MegatronBertParallel, hf.MegatronBertForNextSentencePrediction):
    head_plan = {"cls.seq_relationship": Replicated()}


class MegatronBertForSequenceClassification(MegatronBertParallel, hf.MegatronBertForSequenceClassification):
    head_plan = CLASSIFIER


class MegatronBertForMultipleChoice(MegatronBertParallel, hf.MegatronBertForMultipleChoice):
    head_plan = CLASSIFIER


class MegatronBertForTokenClassification(MegatronBertParallel, hf.MegatronBertForTokenClassification):
    head_plan = CLASSIFIER


class MegatronBertForQuestionAnswering(MegatronBertParallel, hf.MegatronBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
