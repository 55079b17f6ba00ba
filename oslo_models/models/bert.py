"""BERT: bidirectional encoder with post-layer norms; configured with `is_decoder`, a decoder."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import BertConfig
from transformers.models.bert import modeling_bert as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS


class BertParallel(ParallelModel):
    """Sharding plan of the BERT family, and base class for families with other names."""

    added_embeddings: ClassVar[tuple[str, ...]] = ("position", "token_type")  # besides token embeddings

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block: dict[str, Replicated] = {
            "intermediate.dense": ColumnParallel(),
            "output.dense": RowParallel(),
            "output.LayerNorm": Norm(),
        }
        crossed = getattr(config, "add_cross_attention", False)
        for attention in ("attention", "crossattention") if crossed else ("attention",):
            block |= {f"{attention}.self": LocalAttributes({"all_head_size": heads.local_extent})}
            block |= qkv(f"{attention}.self", heads, QUERY_KEY_VALUE)
            block |= {f"{attention}.output.dense": RowParallel(heads), f"{attention}.output.LayerNorm": Norm()}
        tables = {f"embeddings.{name}_embeddings": Replicated() for name in cls.added_embeddings}
        return Plan(
            embed={"embeddings.word_embeddings": VocabParallel(), **tables, "embeddings.LayerNorm": Norm()},
            blocks={"encoder.layer": block},
            head={"pooler.dense": Replicated()},
            optional=("pooler.dense",),
        ).with_rules(embedding_dropouts=("embeddings.dropout",))


LM_HEAD = {
    "cls.predictions.transform.dense": Replicated(),
    "cls.predictions.transform.LayerNorm": Norm(),
    "cls.predictions.decoder": VocabParallel(),
    "cls.predictions.bias": VocabParallel(),
}


class BertModel(BertParallel, hf.BertModel):
    pass


class BertForPreTraining(BertParallel, hf.BertForPreTraining):
    head_plan = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class BertLMHeadModel(BertParallel, hf.BertLMHeadModel):
    head_plan = LM_HEAD


class BertForMaskedLM(BertParallel, hf.BertForMaskedLM):
    head_plan = LM_HEAD


class BertForNextSentencePrediction(BertParallel, hf.BertForNextSentencePrediction):
    head_plan = {"cls.seq_relationship": Replicated()}


class BertForSequenceClassification(BertParallel, hf.BertForSequenceClassification):
    head_plan = CLASSIFIER


class BertForMultipleChoice(BertParallel, hf.BertForMultipleChoice):
    head_plan = CLASSIFIER


class BertForTokenClassification(BertParallel, hf.BertForTokenClassification):
    head_plan = CLASSIFIER


class BertForQuestionAnswering(BertParallel, hf.BertForQuestionAnswering):
    head_plan = QA_OUTPUTS
