"""SigLIP 2: SigLIP for images of any shape, padded to the same number of patches."""

from typing import Any

from transformers import Siglip2Config, Siglip2TextConfig, Siglip2VisionConfig
from transformers.models.siglip2 import modeling_siglip2 as hf

from oslo_models.models.siglip import (
    SiglipClassifierParallel,
    SiglipPairParallel,
    SiglipParallel,
    SiglipTextParallel,
    SiglipVisionParallel,
)
from oslo_models.sharding.pipeline_rules import InputPositions


class Siglip2Parallel(SiglipParallel):
    """Sharding plan of the SigLIP 2 family."""

    @classmethod
    def image_positions(cls, config: Any) -> InputPositions:
        return lambda batch: tuple(batch["pixel_values"].shape[:2])


class Siglip2Model(Siglip2Parallel, SiglipPairParallel, hf.Siglip2Model):
    pass


class Siglip2TextModel(Siglip2Parallel, SiglipTextParallel, hf.Siglip2TextModel):
    pass


class Siglip2VisionModel(Siglip2Parallel, SiglipVisionParallel, hf.Siglip2VisionModel):
    pass


class Siglip2ForImageClassification(Siglip2Parallel, SiglipClassifierParallel, hf.Siglip2ForImageClassification):
    pass
