"""Seed-OSS: Llama with biases of query, key and value."""

from transformers.models.seed_oss import modeling_seed_oss as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class SeedOssParallel(LlamaParallel):
    """How every model of the Seed-OSS family divides."""


globals().update(family(SeedOssParallel, hf, DECODER))
