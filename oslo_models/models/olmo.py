"""OLMo: Llama with norms that have no weights."""

from transformers.models.olmo import modeling_olmo as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class OlmoParallel(LlamaParallel):
    """How every model of the OLMo family divides."""


globals().update(family(OlmoParallel, hf, DECODER))
