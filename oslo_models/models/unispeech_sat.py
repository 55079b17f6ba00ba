"""UniSpeech-SAT: UniSpeech trained to tell speakers apart."""

from transformers import UniSpeechSatConfig
from transformers.models.unispeech_sat import modeling_unispeech_sat as hf

from oslo_models.models.wav2vec2 import CLASSIFIER, FRAMES, SPEAKERS, Wav2Vec2Parallel
from oslo_models.sharding.plan import Replicated


class UniSpeechSatModel(Wav2Vec2Parallel, hf.UniSpeechSatModel):
    returns_features = True


class UniSpeechSatForCTC(Wav2Vec2Parallel, hf.UniSpeechSatForCTC):
    head_plan = {"lm_head": Replicated()}


class UniSpeechSatForSequenceClassification(Wav2Vec2Parallel, hf.UniSpeechSatForSequenceClassification):
    head_plan = CLASSIFIER


class UniSpeechSatForAudioFrameClassification(Wav2Vec2Parallel, hf.UniSpeechSatForAudioFrameClassification):
    head_plan = FRAMES
    loss_is_mean = False


class UniSpeechSatForXVector(Wav2Vec2Parallel, hf.UniSpeechSatForXVector):
    head_plan = SPEAKERS
