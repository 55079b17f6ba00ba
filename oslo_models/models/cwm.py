"""CWM: Llama with sliding-window attention in most blocks."""

from transformers import CwmConfig
from transformers.models.cwm import modeling_cwm as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class CwmModel(LlamaParallel, hf.CwmModel):
    pass


class CwmForCausalLM(LlamaParallel, hf.CwmForCausalLM):
    head_plan = LM_HEAD
