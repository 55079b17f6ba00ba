"""MobileBERT: BERT with bottleneck blocks. Its vocabulary is replicated, since the head extends it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import MobileBertConfig
from transformers.models.mobilebert import modeling_mobilebert as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.sharding.layout import EvenSplit

LM_HEAD: Entries = {
    "cls.predictions.transform.dense": Replicated(),
    "cls.predictions.transform.LayerNorm": Norm(),
    "cls.predictions.dense": Replicated(),
    "cls.predictions.decoder": Replicated(),
    "cls.predictions.bias": Replicated(),
}
BOTTLENECKS = ("bottleneck.input", "bottleneck.attention", "output.bottleneck")


@dataclass(frozen=True)
class ReplicatedEmbedding(Replicated):
    """Replicated token embedding."""

    embeds_tokens: ClassVar[bool] = True


class MobileBertParallel(BertParallel):
    """Sharding plan of the MobileBERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        heads = EvenSplit(config.num_attention_heads, config.true_hidden_size // config.num_attention_heads)
        block: dict[str, Replicated] = {
            **qkv("attention.self", heads, QUERY_KEY_VALUE),
            "attention.output.dense": RowParallel(heads),
            "attention.output.LayerNorm": Norm(),
        }
        for mlp in ("", *(f"ffn.{i}." for i in range(config.num_feedforward_networks - 1))):
            block |= {
                f"{mlp}intermediate.dense": ColumnParallel(),
                f"{mlp}output.dense": RowParallel(),
                f"{mlp}output.LayerNorm": Norm(),
            }
        for name in BOTTLENECKS:
            block |= {f"{name}.dense": Replicated(), f"{name}.LayerNorm": Norm()}
        vocab_entries = {
            "embeddings.word_embeddings": ReplicatedEmbedding(),
            "embeddings.embedding_transformation": Replicated(),
        }
        return replace(
            plan,
            embed={**plan.embed, **vocab_entries},
            blocks={"encoder.layer": block},
            optional=("pooler.dense", *(f"{name}.{layer}" for name in BOTTLENECKS for layer in ("dense", "LayerNorm"))),
        ).with_rules(disabled_after_first_stage={"embeddings.trigram_input": False})


class MobileBertModel(MobileBertParallel, hf.MobileBertModel):
    pass


class MobileBertForPreTraining(MobileBertParallel, hf.MobileBertForPreTraining):
    head_plan = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class MobileBertForMaskedLM(MobileBertParallel, hf.MobileBertForMaskedLM):
    head_plan = LM_HEAD


class MobileBertForNextSentencePrediction(MobileBertParallel, hf.MobileBertForNextSentencePrediction):
    head_plan = {"cls.seq_relationship": Replicated()}


class MobileBertForSequenceClassification(MobileBertParallel, hf.MobileBertForSequenceClassification):
    head_plan = CLASSIFIER


class MobileBertForMultipleChoice(MobileBertParallel, hf.MobileBertForMultipleChoice):
    head_plan = CLASSIFIER


class MobileBertForTokenClassification(MobileBertParallel, hf.MobileBertForTokenClassification):
    head_plan = CLASSIFIER


class MobileBertForQuestionAnswering(MobileBertParallel, hf.MobileBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
