"""MM Grounding DINO: Grounding DINO with learned biases of its classes. Its backbone of images is replicated."""

from transformers import MMGroundingDinoConfig
from transformers.models.mm_grounding_dino import modeling_mm_grounding_dino as hf

from oslo_models.layers.entries import Replicated
from oslo_models.models.grounding_dino import GroundingDinoParallel


class MMGroundingDinoModel(GroundingDinoParallel, hf.MMGroundingDinoModel):
    pass


class MMGroundingDinoForObjectDetection(GroundingDinoParallel, hf.MMGroundingDinoForObjectDetection):
    head_plan = {"class_embed": Replicated(), "bbox_embed": Replicated()}
