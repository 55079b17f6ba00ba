"""GTE: Nomic BERT with biases."""

from transformers import GteConfig
from transformers.models.gte import modeling_gte as hf

from oslo_models.layers.entries import Norm, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.nomic_bert import NomicBertParallel


class GteModel(NomicBertParallel, hf.GteModel):
    pass


class GteForMaskedLM(NomicBertParallel, hf.GteForMaskedLM):
    head_plan = {"lm_head.dense": Replicated(), "lm_head.layer_norm": Norm(), "lm_head.decoder": VocabParallel()}


class GteForSequenceClassification(NomicBertParallel, hf.GteForSequenceClassification):
    head_plan = CLASSIFIER


class GteForTokenClassification(NomicBertParallel, hf.GteForTokenClassification):
    head_plan = CLASSIFIER
