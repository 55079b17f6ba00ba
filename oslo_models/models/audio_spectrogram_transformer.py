"""Audio Spectrogram Transformer: ViT on overlapping patches of a spectrogram."""

from typing import Any

from transformers import ASTConfig
from transformers.models.audio_spectrogram_transformer import modeling_audio_spectrogram_transformer as hf

from oslo_models.models.vit import ViTParallel
from oslo_models.sharding.plan import Plan, Replicated


class ASTParallel(ViTParallel):
    """Sharding plan of the Audio Spectrogram Transformer family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        def positions(batch: Any) -> tuple[int, int]:
            rows, frames, bins = batch["input_values"].shape
            times = (frames - config.patch_size) // config.time_stride + 1
            frequencies = (bins - config.patch_size) // config.frequency_stride + 1
            return rows, 2 + times * frequencies

        return super().plan(config).with_rules(input_positions={"layers": positions})


class ASTModel(ASTParallel, hf.ASTModel):
    pass


class ASTForAudioClassification(ASTParallel, hf.ASTForAudioClassification):
    head_plan = {"classifier": Replicated()}
