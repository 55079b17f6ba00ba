"""CWM: Llama of which most blocks attend to a window."""

from transformers import CwmConfig
from transformers.models.cwm import modeling_cwm as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class CwmParallel(LlamaParallel):
    """How every model of the CWM family divides."""


class CwmModel(CwmParallel, hf.CwmModel):
    pass


class CwmForCausalLM(CwmParallel, hf.CwmForCausalLM):
    head_plan = LM_HEAD
