"""CWM: Llama of which most blocks attend to a window."""

from transformers.models.cwm import modeling_cwm as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class CwmParallel(LlamaParallel):
    """How every model of the CWM family divides."""


globals().update(family(CwmParallel, hf, DECODER))
