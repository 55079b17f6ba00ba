"""BERT generation: BERT without types of tokens, as an encoder or a decoder."""

from transformers.models.bert_generation import modeling_bert_generation as hf

from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Vocab

HEADS = {"Encoder": {}, "Decoder": {"lm_head.decoder": Vocab(), "lm_head.bias": Vocab()}}


class BertGenerationParallel(BertParallel):
    """How every model of the BERT generation family divides."""

    tables = ("position",)


globals().update(family(BertGenerationParallel, hf, HEADS))
