"""BERT generation: BERT without token types, as an encoder or a decoder."""

from transformers import BertGenerationConfig
from transformers.models.bert_generation import modeling_bert_generation as hf

from oslo_models.layers.entries import VocabParallel
from oslo_models.models.bert import BertParallel


class BertGenerationParallel(BertParallel):
    """Sharding plan of the BERT generation family."""

    added_embeddings = ("position",)


class BertGenerationEncoder(BertGenerationParallel, hf.BertGenerationEncoder):
    pass


class BertGenerationDecoder(BertGenerationParallel, hf.BertGenerationDecoder):
    head_plan = {"lm_head.decoder": VocabParallel(), "lm_head.bias": VocabParallel()}
