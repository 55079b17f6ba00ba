"""MOSS-Transcribe-Diarize: Whisper's encoder, a projector that joins neighbouring frames, and Qwen3."""

from transformers import MossTranscribeDiarizeAudioConfig, MossTranscribeDiarizeConfig
from transformers.models.moss_transcribe_diarize import modeling_moss_transcribe_diarize as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class MossTranscribeDiarizeAudioModel(WhisperEncoderParallel, hf.MossTranscribeDiarizeAudioModel):
    pass


class MossTranscribeDiarizeParallel(VoxtralParallel):
    """Sharding plan of the MOSS-Transcribe-Diarize family."""

    classes = {"audio_tower": MossTranscribeDiarizeAudioModel}


class MossTranscribeDiarizeModel(MossTranscribeDiarizeParallel, hf.MossTranscribeDiarizeModel):
    pass


class MossTranscribeDiarizeForConditionalGeneration(
    MossTranscribeDiarizeParallel, hf.MossTranscribeDiarizeForConditionalGeneration
):
    head_plan = LM_HEAD
