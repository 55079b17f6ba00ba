"""ERNIE 4.5: Llama with interleaved rotary positions."""

from transformers.models.ernie4_5 import modeling_ernie4_5 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class Ernie4_5Parallel(LlamaParallel):  # noqa: N801  transformers' name
    """How every model of the ERNIE 4.5 family divides."""


globals().update(family(Ernie4_5Parallel, hf, DECODER))
