"""DistilBERT: BERT with half of the blocks and without token types."""

from typing import Any

from transformers import DistilBertConfig
from transformers.models.distilbert import modeling_distilbert as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import QA_OUTPUTS

CLASSIFIER: Entries = {"pre_classifier": Replicated(), "classifier": Replicated()}


class DistilBertParallel(ParallelModel):
    """Sharding plan of the DistilBERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            **qkv("attention", heads, ("q_lin", "k_lin", "v_lin")),
            "attention.out_lin": RowParallel(heads),
            "sa_layer_norm": Norm(),
            "ffn.lin1": ColumnParallel(),
            "ffn.lin2": RowParallel(),
            "output_layer_norm": Norm(),
        }
        tables = {"embeddings.word_embeddings": VocabParallel(), "embeddings.position_embeddings": Replicated()}
        return Plan(
            embed={**tables, "embeddings.LayerNorm": Norm()},
            blocks={"transformer.layer": block},
            head={},
        ).with_rules(embedding_dropouts=("embeddings.dropout",))


class DistilBertModel(DistilBertParallel, hf.DistilBertModel):
    pass


class DistilBertForMaskedLM(DistilBertParallel, hf.DistilBertForMaskedLM):
    head_plan = {"vocab_transform": Replicated(), "vocab_layer_norm": Norm(), "vocab_projector": VocabParallel()}


class DistilBertForSequenceClassification(DistilBertParallel, hf.DistilBertForSequenceClassification):
    head_plan = CLASSIFIER


class DistilBertForMultipleChoice(DistilBertParallel, hf.DistilBertForMultipleChoice):
    head_plan = CLASSIFIER


class DistilBertForTokenClassification(DistilBertParallel, hf.DistilBertForTokenClassification):
    head_plan = {"classifier": Replicated()}


class DistilBertForQuestionAnswering(DistilBertParallel, hf.DistilBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
