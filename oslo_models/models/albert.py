"""ALBERT: BERT with weights shared by all blocks, and factorised embeddings."""

from dataclasses import replace
from typing import Any

from transformers import AlbertConfig
from transformers.models.albert import modeling_albert as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, heads_of, qkv
from oslo_models.modeling.heads import QA_OUTPUTS
from oslo_models.models.bert import BertParallel

LM_HEAD: Entries = {
    "predictions.dense": Replicated(),
    "predictions.LayerNorm": Norm(),
    "predictions.decoder": VocabParallel(),
    "predictions.bias": VocabParallel(),
}
CLASSIFIER: Entries = {"classifier": Replicated()}


class AlbertParallel(BertParallel):
    """Sharding plan of the ALBERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = heads_of(config)
        layer = {
            **qkv("attention", heads, QUERY_KEY_VALUE),
            "attention.dense": RowParallel(heads),
            "attention.LayerNorm": Norm(),
            "ffn": ColumnParallel(),
            "ffn_output": RowParallel(),
            "full_layer_layer_norm": Norm(),
        }
        block = {f"albert_layers.{i}.{name}": layer[name] for i in range(config.inner_group_num) for name in layer}
        return replace(
            plan,
            embed={**plan.embed, "encoder.embedding_hidden_mapping_in": Replicated()},
            blocks={"encoder.albert_layer_groups": block},
            head={"pooler": Replicated()},
            optional=("pooler",),
        ).with_rules(single_stage_reason="its blocks share their weights, so every stage would hold all of them")


class AlbertModel(AlbertParallel, hf.AlbertModel):
    pass


class AlbertForPreTraining(AlbertParallel, hf.AlbertForPreTraining):
    head_plan = {
        **LM_HEAD,
        "sop_classifier.classifier": Replicated(),
    }


class AlbertForMaskedLM(AlbertParallel, hf.AlbertForMaskedLM):
    head_plan = LM_HEAD


class AlbertForSequenceClassification(AlbertParallel, hf.AlbertForSequenceClassification):
    head_plan = CLASSIFIER


class AlbertForMultipleChoice(AlbertParallel, hf.AlbertForMultipleChoice):
    head_plan = CLASSIFIER


class AlbertForTokenClassification(AlbertParallel, hf.AlbertForTokenClassification):
    head_plan = CLASSIFIER


class AlbertForQuestionAnswering(AlbertParallel, hf.AlbertForQuestionAnswering):
    head_plan = QA_OUTPUTS
