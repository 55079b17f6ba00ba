"""InstructBLIP: BLIP-2 with a Q-Former that also reads the instruction."""

from transformers import InstructBlipConfig, InstructBlipVisionConfig
from transformers.models.instructblip import modeling_instructblip as hf

from oslo_models.models.blip import BlipVisionParallel
from oslo_models.models.blip_2 import WithQFormerParallel


class InstructBlipVisionModel(BlipVisionParallel, hf.InstructBlipVisionModel):
    pass


class InstructBlipForConditionalGeneration(WithQFormerParallel, hf.InstructBlipForConditionalGeneration):
    pass
