"""BERT generation: BERT without types of tokens, as an encoder or a decoder."""

from transformers import BertGenerationConfig
from transformers.models.bert_generation import modeling_bert_generation as hf

from oslo_models.models.bert import BertParallel
from oslo_models.sharding.plan import VocabParallel


class BertGenerationParallel(BertParallel):
    """How every model of the BERT generation family divides."""

    tables = ("position",)


class BertGenerationEncoder(BertGenerationParallel, hf.BertGenerationEncoder):
    pass


class BertGenerationDecoder(BertGenerationParallel, hf.BertGenerationDecoder):
    head_plan = {"lm_head.decoder": VocabParallel(), "lm_head.bias": VocabParallel()}
