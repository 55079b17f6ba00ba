"""Gemma 3, its text model: Gemma 2 with query and key norms in place of the soft caps."""

from typing import ClassVar

from transformers import Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3 as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.gemma2 import Gemma2Parallel


class Gemma3Parallel(Gemma2Parallel):
    """Sharding plan of the Gemma 3 family."""

    head_norms: ClassVar[tuple[str, ...]] = ("self_attn.q_norm", "self_attn.k_norm")


class Gemma3TextModel(Gemma3Parallel, hf.Gemma3TextModel):
    pass


class Gemma3ForCausalLM(Gemma3Parallel, hf.Gemma3ForCausalLM):
    head_plan = LM_HEAD


class Gemma3TextForSequenceClassification(Gemma3Parallel, hf.Gemma3TextForSequenceClassification):
    head_plan = SCORE
