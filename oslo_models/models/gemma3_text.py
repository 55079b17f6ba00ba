"""Gemma 3, its text model: Gemma 2 with norms of each query and key head in place of the caps."""

from transformers.models.gemma3 import modeling_gemma3 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.gemma2 import Gemma2Parallel
from oslo_models.plan import Replicated

HEADS = {
    "TextModel": {},
    "ForCausalLM": DECODER["ForCausalLM"],
    "TextForSequenceClassification": {"score": Replicated()},
}


class Gemma3Parallel(Gemma2Parallel):
    """How every model of the Gemma 3 family divides."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")


globals().update(family(Gemma3Parallel, hf, HEADS))
