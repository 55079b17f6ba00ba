"""UltraBERT: EuroBERT with windows of attention in some blocks."""

from transformers import UltrabertConfig
from transformers.models.ultrabert import modeling_ultrabert as hf

from oslo_models.layers.entries import Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.llama import LlamaParallel


class UltrabertModel(LlamaParallel, hf.UltrabertModel):
    pass


class UltrabertForMaskedLM(LlamaParallel, hf.UltrabertForMaskedLM):
    head_plan = {"head.linear1": Replicated(), "head.linear2": Replicated(), "head.decoder": VocabParallel()}


class UltrabertForSequenceClassification(LlamaParallel, hf.UltrabertForSequenceClassification):
    head_plan = CLASSIFIER


class UltrabertForTokenClassification(LlamaParallel, hf.UltrabertForTokenClassification):
    head_plan = CLASSIFIER


class UltrabertForQuestionAnswering(LlamaParallel, hf.UltrabertForQuestionAnswering):
    head_plan = QA_OUTPUTS
