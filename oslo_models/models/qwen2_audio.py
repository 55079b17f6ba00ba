"""Qwen2-Audio: Voxtral with Qwen2 as decoder, and masks of padding frames."""

from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig
from transformers.models.qwen2_audio import modeling_qwen2_audio as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class Qwen2AudioEncoder(WhisperEncoderParallel, hf.Qwen2AudioEncoder):
    pass


class Qwen2AudioModel(VoxtralParallel, hf.Qwen2AudioModel):
    pass


class Qwen2AudioForConditionalGeneration(VoxtralParallel, hf.Qwen2AudioForConditionalGeneration):
    head_plan = LM_HEAD
