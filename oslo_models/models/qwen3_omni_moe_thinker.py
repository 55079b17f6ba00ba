"""Qwen3-Omni, its thinker: Qwen3-VL MoE, and the encoder of sounds of Qwen3-ASR with its projector inside."""

from transformers import Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_asr import Qwen3ASREncoderParallel
from oslo_models.models.qwen3_moe import Qwen3MoeParallel
from oslo_models.models.qwen3_vl import Qwen3VLEncoderParallel, Qwen3VLParallel


class Qwen3OmniMoeAudioEncoder(Qwen3ASREncoderParallel, hf.Qwen3OmniMoeAudioEncoder):
    projectors = ("proj1", "proj2")


class Qwen3OmniMoeVisionEncoder(Qwen3VLEncoderParallel, hf.Qwen3OmniMoeVisionEncoder):
    mergers = {"merger": Replicated(), "merger_list": Replicated()}


class Qwen3OmniMoeThinkerTextModel(Qwen3MoeParallel, hf.Qwen3OmniMoeThinkerTextModel):
    pass


class Qwen3OmniMoeThinkerParallel(Qwen3VLParallel):
    """Sharding plan of the Qwen3-Omni family."""

    loss_is_mean = False  # convolutions read the padding of sounds shorter than the longest of all rows
    towers = {**Qwen3VLParallel.towers, "audio_tower": "audio_config"}
    classes = {
        "language_model": Qwen3OmniMoeThinkerTextModel,
        "visual": Qwen3OmniMoeVisionEncoder,
        "audio_tower": Qwen3OmniMoeAudioEncoder,
    }


class Qwen3OmniMoeThinkerModel(Qwen3OmniMoeThinkerParallel, hf.Qwen3OmniMoeThinkerModel):
    pass


class Qwen3OmniMoeThinkerForConditionalGeneration(
    Qwen3OmniMoeThinkerParallel, hf.Qwen3OmniMoeThinkerForConditionalGeneration
):
    head_plan = LM_HEAD
