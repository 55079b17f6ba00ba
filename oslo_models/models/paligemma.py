"""PaliGemma: the tower of SigLIP, a projector and Gemma."""

from transformers import PaliGemmaConfig
from transformers.models.paligemma import modeling_paligemma as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class PaliGemmaModel(LlavaParallel, hf.PaliGemmaModel):
    pass


class PaliGemmaForConditionalGeneration(LlavaParallel, hf.PaliGemmaForConditionalGeneration):
    head_plan = LM_HEAD
