"""Canary: Cohere ASR with sinusoidal positions."""

from typing import Any

from transformers import CanaryConfig, CanaryDecoderConfig
from transformers.models.canary import modeling_canary as hf

from oslo_models.layers.entries import VocabParallel
from oslo_models.models.cohere_asr import CohereAsrParallel


class CanaryParallel(CohereAsrParallel):
    """Sharding plan of the Canary family."""

    tables = {}

    @staticmethod
    def decoder_of(config: Any) -> Any:
        return config.decoder_config


class CanaryModel(CanaryParallel, hf.CanaryModel):
    pass


class CanaryForConditionalGeneration(CanaryParallel, hf.CanaryForConditionalGeneration):
    head_plan = {"proj_out": VocabParallel()}
