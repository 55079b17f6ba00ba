"""XLM-RoBERTa: RoBERTa for a hundred languages."""

from transformers.models.xlm_roberta import modeling_xlm_roberta as hf

from oslo_models.models.family import family
from oslo_models.models.roberta import HEADS, RobertaParallel


class XLMRobertaParallel(RobertaParallel):
    """How every model of the XLM-RoBERTa family divides."""


globals().update(family(XLMRobertaParallel, hf, HEADS))
