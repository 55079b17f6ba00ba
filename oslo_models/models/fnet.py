"""FNet: BERT with Fourier transforms in place of attention. They have no weights, and run on every rank."""

from typing import Any

from transformers import FNetConfig
from transformers.models.fnet import modeling_fnet as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD


class FNetParallel(ParallelModel):
    """Sharding plan of the FNet family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block = {
            "fourier.output.LayerNorm": Norm(),
            "intermediate.dense": ColumnParallel(),
            "output.dense": RowParallel(),
            "output.LayerNorm": Norm(),
        }
        others = ("position_embeddings", "token_type_embeddings", "projection")
        embed = {"word_embeddings": VocabParallel(), **dict.fromkeys(others, Replicated()), "LayerNorm": Norm()}
        return Plan(
            embed={f"embeddings.{name}": entry for name, entry in embed.items()},
            blocks={"encoder.layer": block},
            head={"pooler.dense": Replicated()},
            optional=("pooler.dense",),
        ).with_rules(embedding_dropouts=("embeddings.dropout",))


class FNetModel(FNetParallel, hf.FNetModel):
    pass


class FNetForPreTraining(FNetParallel, hf.FNetForPreTraining):
    head_plan = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class FNetForMaskedLM(FNetParallel, hf.FNetForMaskedLM):
    head_plan = LM_HEAD


class FNetForNextSentencePrediction(FNetParallel, hf.FNetForNextSentencePrediction):
    head_plan = {"cls.seq_relationship": Replicated()}


class FNetForSequenceClassification(FNetParallel, hf.FNetForSequenceClassification):
    head_plan = CLASSIFIER


class FNetForMultipleChoice(FNetParallel, hf.FNetForMultipleChoice):
    head_plan = CLASSIFIER


class FNetForTokenClassification(FNetParallel, hf.FNetForTokenClassification):
    head_plan = CLASSIFIER


class FNetForQuestionAnswering(FNetParallel, hf.FNetForQuestionAnswering):
    head_plan = QA_OUTPUTS
