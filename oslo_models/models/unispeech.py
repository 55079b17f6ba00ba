"""UniSpeech: Wav2Vec2 with another training objective."""

from transformers import UniSpeechConfig
from transformers.models.unispeech import modeling_unispeech as hf

from oslo_models.models.wav2vec2 import CLASSIFIER, Wav2Vec2Parallel
from oslo_models.sharding.plan import Replicated


class UniSpeechModel(Wav2Vec2Parallel, hf.UniSpeechModel):
    returns_features = True


class UniSpeechForCTC(Wav2Vec2Parallel, hf.UniSpeechForCTC):
    head_plan = {"lm_head": Replicated()}


class UniSpeechForSequenceClassification(Wav2Vec2Parallel, hf.UniSpeechForSequenceClassification):
    head_plan = CLASSIFIER
