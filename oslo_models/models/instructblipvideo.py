"""InstructBLIP for videos: the Q-Former pools each frame."""

from transformers import InstructBlipVideoConfig, InstructBlipVideoVisionConfig
from transformers.models.instructblipvideo import modeling_instructblipvideo as hf

from oslo_models.models.blip import BlipVisionParallel
from oslo_models.models.blip_2 import WithQFormerParallel


class InstructBlipVideoVisionModel(BlipVisionParallel, hf.InstructBlipVideoVisionModel):
    pass


class InstructBlipVideoForConditionalGeneration(WithQFormerParallel, hf.InstructBlipVideoForConditionalGeneration):
    pass
