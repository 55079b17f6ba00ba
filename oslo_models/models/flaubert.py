"""FlauBERT: XLM for French."""

from transformers.models.flaubert import modeling_flaubert as hf

from oslo_models.models.family import family
from oslo_models.models.xlm import HEADS, XLMParallel


class FlaubertParallel(XLMParallel):
    """How every model of the FlauBERT family divides."""


globals().update(family(FlaubertParallel, hf, HEADS))
