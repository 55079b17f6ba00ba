"""Gemma 4 without encoders of images and sounds, its text model: Gemma 4 without experts."""

from transformers import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified import modeling_gemma4_unified as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.gemma4_text import Gemma4Parallel


class Gemma4UnifiedTextModel(Gemma4Parallel, hf.Gemma4UnifiedTextModel):
    pass


class Gemma4UnifiedForCausalLM(Gemma4Parallel, hf.Gemma4UnifiedForCausalLM):
    head_plan = LM_HEAD
