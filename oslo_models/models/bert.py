"""BERT: an encoder (or, so configured, a decoder) with norms after the residuals and many heads."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import BertConfig
from transformers.models.bert import modeling_bert as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel


class BertParallel(ParallelModel):
    """How every model of the BERT family divides, and those of the families that differ from it by names."""

    tables: ClassVar[tuple[str, ...]] = ("position", "token_type")  # the embeddings that are added to those of words

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {"intermediate.dense": ColumnParallel(), "output.dense": RowParallel(), "output.LayerNorm": Norm()}
        crossed = getattr(config, "add_cross_attention", False)
        for attention in ("attention", "crossattention") if crossed else ("attention",):
            block |= {f"{attention}.self.{name}": ColumnParallel(heads) for name in ("query", "key", "value")}
            block |= {f"{attention}.output.dense": RowParallel(heads), f"{attention}.output.LayerNorm": Norm()}
        tables = {f"embeddings.{name}_embeddings": Replicated() for name in cls.tables}
        return Plan(
            embed={"embeddings.word_embeddings": VocabParallel(), **tables, "embeddings.LayerNorm": Norm()},
            blocks={"encoder.layer": block},
            head={"pooler.dense": Replicated()},
            local={f"{name}.self.all_head_size": heads.local_extent for name in ("attention", "crossattention")},
            optional=("pooler.dense",),
            dropout=("embeddings.dropout",),
        )


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
    head_plan = {"classifier": Replicated()}


class BertForMultipleChoice(BertParallel, hf.BertForMultipleChoice):
    head_plan = {"classifier": Replicated()}


class BertForTokenClassification(BertParallel, hf.BertForTokenClassification):
    head_plan = {"classifier": Replicated()}


class BertForQuestionAnswering(BertParallel, hf.BertForQuestionAnswering):
    head_plan = {"qa_outputs": Replicated()}
