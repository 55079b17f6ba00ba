"""Audio Flamingo 3: Voxtral with Qwen2 as decoder, and masks of padding frames."""

from transformers import AudioFlamingo3Config, AudioFlamingo3EncoderConfig
from transformers.models.audioflamingo3 import modeling_audioflamingo3 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class AudioFlamingo3Encoder(WhisperEncoderParallel, hf.AudioFlamingo3Encoder):
    pass


class AudioFlamingo3Model(VoxtralParallel, hf.AudioFlamingo3Model):
    pass


class AudioFlamingo3ForConditionalGeneration(VoxtralParallel, hf.AudioFlamingo3ForConditionalGeneration):
    head_plan = LM_HEAD
