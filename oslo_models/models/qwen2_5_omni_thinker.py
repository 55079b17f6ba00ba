"""Qwen2.5-Omni, its thinker: Qwen2.5-VL, and an encoder of sounds with the blocks of Whisper on packed windows."""

from transformers import Qwen2_5OmniThinkerConfig
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hf

from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen2_vl import QwenEncoderParallel, QwenWithImagesParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class Qwen2_5OmniAudioEncoder(WhisperEncoderParallel, hf.Qwen2_5OmniAudioEncoder):
    audio_layers = ("conv1", "conv2", "audio_bos_eos_token")
    final_norm = "ln_post"
    projectors = ("proj",)
    reason = "the windows of all sounds are one row"


class Qwen2_5OmniVisionEncoder(QwenEncoderParallel, hf.Qwen2_5OmniVisionEncoder):
    mlp = gated_mlp("mlp")
    qkv = ("q", "k", "v")


class Qwen2_5OmniThinkerTextModel(LlamaParallel, hf.Qwen2_5OmniThinkerTextModel):
    pass


class Qwen2_5OmniThinkerParallel(QwenWithImagesParallel):
    """Sharding plan of the Qwen2.5-Omni family."""

    towers = {**QwenWithImagesParallel.towers, "audio_tower": "audio_config"}
    classes = {
        "language_model": Qwen2_5OmniThinkerTextModel,
        "visual": Qwen2_5OmniVisionEncoder,
        "audio_tower": Qwen2_5OmniAudioEncoder,
    }


class Qwen2_5OmniThinkerModel(Qwen2_5OmniThinkerParallel, hf.Qwen2_5OmniThinkerModel):
    pass


class Qwen2_5OmniThinkerForConditionalGeneration(
    Qwen2_5OmniThinkerParallel, hf.Qwen2_5OmniThinkerForConditionalGeneration
):
    head_plan = LM_HEAD
