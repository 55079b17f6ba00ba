"""Data2Vec for audio: Wav2Vec2 with several convolutions of positions."""

from transformers import Data2VecAudioConfig
from transformers.models.data2vec import modeling_data2vec_audio as hf

from oslo_models.models.wav2vec2 import CLASSIFIER, FRAMES, SPEAKERS, Wav2Vec2Parallel
from oslo_models.sharding.plan import Replicated


class Data2VecAudioModel(Wav2Vec2Parallel, hf.Data2VecAudioModel):
    returns_features = True


class Data2VecAudioForCTC(Wav2Vec2Parallel, hf.Data2VecAudioForCTC):
    head_plan = {"lm_head": Replicated()}


class Data2VecAudioForSequenceClassification(Wav2Vec2Parallel, hf.Data2VecAudioForSequenceClassification):
    head_plan = CLASSIFIER


class Data2VecAudioForAudioFrameClassification(Wav2Vec2Parallel, hf.Data2VecAudioForAudioFrameClassification):
    head_plan = FRAMES
    loss_is_mean = False


class Data2VecAudioForXVector(Wav2Vec2Parallel, hf.Data2VecAudioForXVector):
    head_plan = SPEAKERS
