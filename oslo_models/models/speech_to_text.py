"""Speech2Text: BART with a convolutional audio front end, replicated on every rank, and sinusoidal positions."""

from typing import Any

from transformers import Speech2TextConfig
from transformers.models.speech_to_text import modeling_speech_to_text as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.whisper import WhisperParallel


class Speech2TextParallel(WhisperParallel):
    """Sharding plan of the Speech2Text family."""

    audio_layers = ("conv", "embed_positions")
    embedding_changes = {"dropout": 0.0, "embed_scale": 1.0}

    @staticmethod
    def positions(config: Any, batch: Any) -> tuple[int, int]:
        rows, frames, _ = batch["input_features"].shape
        for _ in range(config.num_conv_layers):
            frames = (frames - 1) // 2 + 1
        return rows, frames


class Speech2TextModel(Speech2TextParallel, hf.Speech2TextModel):
    pass


class Speech2TextForConditionalGeneration(Speech2TextParallel, hf.Speech2TextForConditionalGeneration):
    head_plan = LM_HEAD
