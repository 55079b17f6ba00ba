"""Music Flamingo: the encoder of Audio Flamingo 3, with rotary positions of time in the projector, and Qwen2."""

from transformers import MusicFlamingoConfig
from transformers.models.musicflamingo import modeling_musicflamingo as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.voxtral import VoxtralParallel


class MusicFlamingoModel(VoxtralParallel, hf.MusicFlamingoModel):
    pass


class MusicFlamingoForConditionalGeneration(VoxtralParallel, hf.MusicFlamingoForConditionalGeneration):
    head_plan = LM_HEAD
