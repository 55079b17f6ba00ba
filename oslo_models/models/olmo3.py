"""OLMo 3: OLMo 2 of which some blocks attend to a window."""

from transformers.models.olmo3 import modeling_olmo3 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.olmo2 import Olmo2Parallel


class Olmo3Parallel(Olmo2Parallel):
    """How every model of the OLMo 3 family divides."""


globals().update(family(Olmo3Parallel, hf, DECODER))
