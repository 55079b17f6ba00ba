"""Gemma 4 without encoders of images and sounds, its text model: Gemma 4 without experts."""

from transformers import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified import modeling_gemma4_unified as hf
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.gemma4_text import Gemma4Parallel


class Gemma4UnifiedParallel(Gemma4Parallel):
    """Sharding plan of the Gemma 4 Unified family."""


class Gemma4UnifiedTextModel(Gemma4UnifiedParallel, hf.Gemma4UnifiedTextModel):
    pass


class Gemma4UnifiedForCausalLM(Gemma4UnifiedParallel, hf.Gemma4UnifiedForCausalLM):
    head_plan = LM_HEAD
