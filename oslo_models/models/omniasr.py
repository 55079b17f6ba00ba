"""OmniASR: the encoder of OmniASR CTC, a projector and Llama."""

from typing import Any

from transformers import OmniASRAudioConfig, OmniASRConfig
from transformers.models.omniasr import modeling_omniasr as hf

from oslo_models.layers.entries import Plan
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.omniasr_ctc import encoder_plan
from oslo_models.models.voxtral import VoxtralParallel


class OmniASRAudioModel(ParallelModel, hf.OmniASRAudioModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        return encoder_plan(config)


class OmniASRModel(VoxtralParallel, hf.OmniASRModel):
    pass


class OmniASRForConditionalGeneration(VoxtralParallel, hf.OmniASRForConditionalGeneration):
    head_plan = LM_HEAD
