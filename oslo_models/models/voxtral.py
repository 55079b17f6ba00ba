"""Voxtral: an encoder of sounds with the blocks of Whisper, a projector and Llama."""

from transformers import VoxtralConfig, VoxtralEncoderConfig
from transformers.models.voxtral import modeling_voxtral as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class VoxtralParallel(LlavaParallel):
    """Sharding plan of the Voxtral family, and base class for other models of a decoder and an encoder of sounds."""

    towers = {"audio_tower": "audio_config"}


class VoxtralEncoder(WhisperEncoderParallel, hf.VoxtralEncoder):
    pass


class VoxtralModel(VoxtralParallel, hf.VoxtralModel):
    pass


class VoxtralForConditionalGeneration(VoxtralParallel, hf.VoxtralForConditionalGeneration):
    head_plan = LM_HEAD
