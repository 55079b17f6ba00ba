"""SpeechEncoderDecoder: an encoder of audio of this table, and a decoder of it with cross-attention."""

from typing import Any

from transformers import SpeechEncoderDecoderConfig
from transformers.models.speech_encoder_decoder import modeling_speech_encoder_decoder as hf

from oslo_models.layers.entries import Plan
from oslo_models.models.encoder_decoder import EncoderDecoderParallel


class SpeechEncoderDecoderModel(EncoderDecoderParallel, hf.SpeechEncoderDecoderModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        if not getattr(config.encoder, "add_adapter", False):
            return plan
        reason = "with add_adapter=True, the decoder reads a shorter sequence than the blocks of the encoder"
        return plan.with_rules(single_stage_reason=plan.pipeline.single_stage_reason or reason)
