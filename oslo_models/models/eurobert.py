"""EuroBERT: Llama's blocks with bidirectional attention."""

from transformers import EuroBertConfig
from transformers.models.eurobert import modeling_eurobert as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import CLASSIFIER, LM_HEAD
from oslo_models.models.llama import LlamaParallel


class EuroBertModel(LlamaParallel, hf.EuroBertModel):
    pass


class EuroBertForMaskedLM(LlamaParallel, hf.EuroBertForMaskedLM):
    head_plan = LM_HEAD


class EuroBertForSequenceClassification(LlamaParallel, hf.EuroBertForSequenceClassification):
    head_plan = {"dense": Replicated(), **CLASSIFIER}


class EuroBertForTokenClassification(LlamaParallel, hf.EuroBertForTokenClassification):
    head_plan = CLASSIFIER
