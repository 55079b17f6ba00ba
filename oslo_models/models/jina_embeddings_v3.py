"""Jina Embeddings V3: Nomic BERT with MLPs of two layers."""

from typing import ClassVar

from transformers import JinaEmbeddingsV3Config
from transformers.models.jina_embeddings_v3 import modeling_jina_embeddings_v3 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, RowParallel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.nomic_bert import NomicBertParallel
from oslo_models.models.roberta import LM_HEAD


class JinaEmbeddingsV3Parallel(NomicBertParallel):
    """Sharding plan of the Jina Embeddings V3 family."""

    mlp: ClassVar[Entries] = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}


class JinaEmbeddingsV3Model(JinaEmbeddingsV3Parallel, hf.JinaEmbeddingsV3Model):
    pass


class JinaEmbeddingsV3ForMaskedLM(JinaEmbeddingsV3Parallel, hf.JinaEmbeddingsV3ForMaskedLM):
    head_plan = LM_HEAD


class JinaEmbeddingsV3ForSequenceClassification(JinaEmbeddingsV3Parallel, hf.JinaEmbeddingsV3ForSequenceClassification):
    head_plan = CLASSIFIER


class JinaEmbeddingsV3ForTokenClassification(JinaEmbeddingsV3Parallel, hf.JinaEmbeddingsV3ForTokenClassification):
    head_plan = CLASSIFIER


class JinaEmbeddingsV3ForQuestionAnswering(JinaEmbeddingsV3Parallel, hf.JinaEmbeddingsV3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
