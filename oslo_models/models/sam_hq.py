"""SAM-HQ: SAM with a token for sharper masks. Encoders of prompts and heads are replicated."""

from transformers import SamHQConfig, SamHQMaskDecoderConfig, SamHQPromptEncoderConfig, SamHQVisionConfig
from transformers.models.sam_hq import modeling_sam_hq as hf

from oslo_models.models.sam import SamParallel


class SamHQModel(SamParallel, hf.SamHQModel):
    pass


class SamHQVisionModel(SamParallel, hf.SamHQVisionModel):
    pass
