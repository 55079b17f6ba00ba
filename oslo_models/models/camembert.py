"""CamemBERT: RoBERTa for French."""

from transformers.models.camembert import modeling_camembert as hf

from oslo_models.models.family import family
from oslo_models.models.roberta import HEADS, RobertaParallel


class CamembertParallel(RobertaParallel):
    """How every model of the CamemBERT family divides."""


globals().update(family(CamembertParallel, hf, HEADS))
