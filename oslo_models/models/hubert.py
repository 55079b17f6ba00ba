"""HuBERT: Wav2Vec2 with another training objective."""

from transformers import HubertConfig
from transformers.models.hubert import modeling_hubert as hf
from transformers.models.hubert.modeling_hubert import HubertPreTrainedModel

from oslo_models.models.wav2vec2 import Wav2Vec2Parallel
from oslo_models.sharding.plan import Replicated


class HubertParallel(Wav2Vec2Parallel):
    """Sharding plan of the HuBERT family."""


class HubertModel(HubertParallel, hf.HubertModel):
    pass


class HubertForCTC(HubertParallel, hf.HubertForCTC):
    head_plan = {"lm_head": Replicated()}


class HubertForSequenceClassification(HubertParallel, hf.HubertForSequenceClassification):
    head_plan = {"layer_weights": Replicated(), "projector": Replicated(), "classifier": Replicated()}
