"""Wav2Vec2-Conformer: Wav2Vec2 with Conformer blocks. The convolutions are replicated on every rank."""

from dataclasses import replace
from typing import Any

from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.models.wav2vec2 import CLASSIFIER, FRAMES, SPEAKERS, Wav2Vec2Parallel
from oslo_models.models.wav2vec2_bert import PADDING, RELATIVE, conformer_block


class Wav2Vec2ConformerParallel(Wav2Vec2Parallel):
    """Sharding plan of the Wav2Vec2-Conformer family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(
            plan, blocks={"encoder.layers": conformer_block(config)}, optional=(*plan.optional, *RELATIVE)
        ).with_rules(single_stage_reason=PADDING)


class Wav2Vec2ConformerModel(Wav2Vec2ConformerParallel, hf.Wav2Vec2ConformerModel):
    pass


class Wav2Vec2ConformerForPreTraining(Wav2Vec2ConformerParallel, hf.Wav2Vec2ConformerForPreTraining):
    head_plan = {"quantizer": Replicated(), "project_hid": Replicated(), "project_q": Replicated()}
    loss_inputs = ("sampled_negative_indices",)
    loss_is_mean = False


class Wav2Vec2ConformerForCTC(Wav2Vec2ConformerParallel, hf.Wav2Vec2ConformerForCTC):
    head_plan = {"lm_head": Replicated()}


class Wav2Vec2ConformerForSequenceClassification(
    Wav2Vec2ConformerParallel, hf.Wav2Vec2ConformerForSequenceClassification
):
    head_plan = CLASSIFIER


class Wav2Vec2ConformerForAudioFrameClassification(
    Wav2Vec2ConformerParallel, hf.Wav2Vec2ConformerForAudioFrameClassification
):
    head_plan = FRAMES
    loss_is_mean = False


class Wav2Vec2ConformerForXVector(Wav2Vec2ConformerParallel, hf.Wav2Vec2ConformerForXVector):
    head_plan = SPEAKERS
