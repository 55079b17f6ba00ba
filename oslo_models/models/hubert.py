"""HuBERT: Wav2Vec2, trained otherwise."""

from transformers.models.hubert import modeling_hubert as hf

from oslo_models.models.family import family
from oslo_models.models.wav2vec2 import HEADS, LOSSES, Wav2Vec2Parallel


class HubertParallel(Wav2Vec2Parallel):
    """How every model of the HuBERT family divides."""


globals().update(family(HubertParallel, hf, HEADS, **{**LOSSES, "Model": {}}))  # which returns no features
