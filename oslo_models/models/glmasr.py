"""GLM-ASR: an encoder of sounds with rotary positions, a projector that joins four positions, and Llama."""

from dataclasses import replace
from typing import Any

from transformers import GlmAsrConfig, GlmAsrEncoderConfig
from transformers.models.glmasr import modeling_glmasr as hf

from oslo_models.layers.entries import ColumnParallel, Plan, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.voxtral import VoxtralParallel
from oslo_models.models.whisper import WhisperEncoderParallel


class GlmAsrEncoder(LlamaParallel, hf.GlmAsrEncoder):
    mlp = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(plan, embed={"conv1": Replicated(), "conv2": Replicated()}).with_rules(
            single_stage_reason=WhisperEncoderParallel.reason
        )


class GlmAsrModel(VoxtralParallel, hf.GlmAsrModel):
    pass


class GlmAsrForConditionalGeneration(VoxtralParallel, hf.GlmAsrForConditionalGeneration):
    head_plan = LM_HEAD
