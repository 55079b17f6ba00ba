"""BERT: an encoder (or, so configured, a decoder) with norms after the residuals and many heads."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import BertConfig
from transformers.models.bert import modeling_bert as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.plan import Column, Norm, Plan, Replicated, Row, Vocab


class BertParallel(ParallelModel):
    """How every model of the BERT family divides, and those of the families that differ from it by names."""

    tables: ClassVar[tuple[str, ...]] = ("position", "token_type")  # the embeddings that are added to those of words

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {"intermediate.dense": Column(), "output.dense": Row(), "output.LayerNorm": Norm()}
        crossed = getattr(config, "add_cross_attention", False)
        for attention in ("attention", "crossattention") if crossed else ("attention",):
            block |= {f"{attention}.self.{name}": Column(heads) for name in ("query", "key", "value")}
            block |= {f"{attention}.output.dense": Row(heads), f"{attention}.output.LayerNorm": Norm()}
        tables = {f"embeddings.{name}_embeddings": Replicated() for name in cls.tables}
        return Plan(
            embed={"embeddings.word_embeddings": Vocab(), **tables, "embeddings.LayerNorm": Norm()},
            blocks={"encoder.layer": block},
            head={"pooler.dense": Replicated()},
            local={f"{name}.self.all_head_size": heads.local_extent for name in ("attention", "crossattention")},
            optional=("pooler.dense",),
            dropout=("embeddings.dropout",),
        )


LM_HEAD = {
    "cls.predictions.transform.dense": Replicated(),
    "cls.predictions.transform.LayerNorm": Norm(),
    "cls.predictions.decoder": Vocab(),
    "cls.predictions.bias": Vocab(),
}


class BertModel(BertParallel, hf.BertModel):
    pass


class BertForPreTraining(BertParallel, hf.BertForPreTraining):
    head = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class BertLMHeadModel(BertParallel, hf.BertLMHeadModel):
    head = LM_HEAD


class BertForMaskedLM(BertParallel, hf.BertForMaskedLM):
    head = LM_HEAD


class BertForNextSentencePrediction(BertParallel, hf.BertForNextSentencePrediction):
    head = {"cls.seq_relationship": Replicated()}


class BertForSequenceClassification(BertParallel, hf.BertForSequenceClassification):
    head = {"classifier": Replicated()}


class BertForMultipleChoice(BertParallel, hf.BertForMultipleChoice):
    head = {"classifier": Replicated()}


class BertForTokenClassification(BertParallel, hf.BertForTokenClassification):
    head = {"classifier": Replicated()}


class BertForQuestionAnswering(BertParallel, hf.BertForQuestionAnswering):
    head = {"qa_outputs": Replicated()}
