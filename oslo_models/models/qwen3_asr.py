"""Qwen3-ASR: an encoder of sounds with the blocks of Whisper on packed chunks, a projector and Qwen3."""

from transformers import Qwen3ASRConfig, Qwen3ASREncoderConfig
from transformers.models.qwen3_asr import modeling_qwen3_asr as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class Qwen3ASREncoderParallel(WhisperEncoderParallel):
    """Sharding plan of the encoders of sounds in Qwen3-ASR and Qwen3-Omni."""

    audio_layers = ("conv2d1", "conv2d2", "conv2d3", "conv_out")
    final_norm = "ln_post"
    reason = "the chunks of all sounds are one row"


class Qwen3ASREncoder(Qwen3ASREncoderParallel, hf.Qwen3ASREncoder):
    pass


class Qwen3ASRModel(VoxtralParallel, hf.Qwen3ASRModel):
    pass


class Qwen3ASRForConditionalGeneration(VoxtralParallel, hf.Qwen3ASRForConditionalGeneration):
    head_plan = LM_HEAD


class Qwen3ASRForTokenClassification(VoxtralParallel, hf.Qwen3ASRForTokenClassification):
    head_plan = SCORE
