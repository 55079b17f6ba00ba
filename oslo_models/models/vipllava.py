"""VipLLaVA: LLaVA whose projector reads several blocks of the tower."""

from transformers import VipLlavaConfig
from transformers.models.vipllava import modeling_vipllava as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class VipLlavaModel(LlavaParallel, hf.VipLlavaModel):
    pass


class VipLlavaForConditionalGeneration(LlavaParallel, hf.VipLlavaForConditionalGeneration):
    head_plan = LM_HEAD
