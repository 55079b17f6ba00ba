"""HuBERT: Wav2Vec2 with another training objective."""

from transformers import HubertConfig
from transformers.models.hubert import modeling_hubert as hf

from oslo_models.models.wav2vec2 import CLASSIFIER, Wav2Vec2Parallel
from oslo_models.sharding.plan import Replicated


class HubertModel(Wav2Vec2Parallel, hf.HubertModel):
    pass


class HubertForCTC(Wav2Vec2Parallel, hf.HubertForCTC):
    head_plan = {"lm_head": Replicated()}


class HubertForSequenceClassification(Wav2Vec2Parallel, hf.HubertForSequenceClassification):
    head_plan = CLASSIFIER
