"""VibeVoice ASR: two convolutional encoders of sounds, which every rank holds, a projector and Qwen2."""

from transformers import VibeVoiceAsrConfig
from transformers.models.vibevoice_asr import modeling_vibevoice_asr as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class VibeVoiceAsrParallel(LlavaParallel):
    """Sharding plan of the VibeVoice ASR family."""

    towers = {}
    projectors = dict.fromkeys(
        ("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"), Replicated()
    )


class VibeVoiceAsrModel(VibeVoiceAsrParallel, hf.VibeVoiceAsrModel):
    pass


class VibeVoiceAsrForConditionalGeneration(VibeVoiceAsrParallel, hf.VibeVoiceAsrForConditionalGeneration):
    head_plan = LM_HEAD
