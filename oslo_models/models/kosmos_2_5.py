"""Kosmos-2.5: the encoder of Pix2Struct, latent queries that pool its patches, and the decoder of Kosmos-2."""

from typing import Any

from transformers import Kosmos2_5Config
from transformers.models.kosmos2_5 import modeling_kosmos2_5 as hf

from oslo_models.layers.entries import Replicated, VocabParallel
from oslo_models.models.kosmos_2 import Kosmos2Parallel, KosmosTextParallel
from oslo_models.models.pix2struct import Pix2StructVisionParallel
from oslo_models.sharding.layout import EvenSplit


class Kosmos2_5VisionParallel(Pix2StructVisionParallel):
    """Sharding plan of the encoder."""

    @staticmethod
    def heads(config: Any) -> EvenSplit:
        return EvenSplit(config.num_attention_heads, config.head_dim)


class Kosmos2_5TextParallel(KosmosTextParallel):
    """Sharding plan of the decoder."""

    tables = {"embed_tokens": VocabParallel(), "segment_emb": Replicated()}
    reason = "its decoder has the head inside"


class Kosmos2_5Parallel(Kosmos2Parallel):
    """Sharding plan of the Kosmos-2.5 family."""

    towers = {"vision_model": "vision_config"}
    classes = {"text_model.model": Kosmos2_5TextParallel, "vision_model": Kosmos2_5VisionParallel}


class Kosmos2_5Model(Kosmos2_5Parallel, hf.Kosmos2_5Model):
    pass


class Kosmos2_5ForConditionalGeneration(Kosmos2_5Parallel, hf.Kosmos2_5ForConditionalGeneration):
    head_plan = {"text_model.lm_head": VocabParallel()}
