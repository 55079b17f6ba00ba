"""CWM: Llama with sliding-window attention in most blocks."""

from transformers import CwmConfig
from transformers.models.cwm import modeling_cwm as hf
from transformers.models.cwm.modeling_cwm import CwmPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class CwmParallel(LlamaParallel):
    """Sharding plan of the CWM family."""


class CwmModel(CwmParallel, hf.CwmModel):
    pass


class CwmForCausalLM(CwmParallel, hf.CwmForCausalLM):
    head_plan = LM_HEAD
