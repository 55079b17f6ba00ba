"""Granite Speech 5 CTC: Parakeet CTC with relative positions in windows, and blocks that halve the sequence."""

from transformers import GraniteSpeech5CTCConfig, GraniteSpeech5EncoderConfig
from transformers.models.granite_speech5 import modeling_granite_speech5 as hf

from oslo_models.layers.entries import Entries, LocalAttributes, Replicated, SharedOutput
from oslo_models.models.parakeet_ctc import ParakeetParallel
from oslo_models.sharding.layout import EvenSplit


class GraniteSpeech5Parallel(ParakeetParallel):
    """Sharding plan of the Granite Speech 5 family."""

    subsampler_name = "input_linear"
    head = {"out": Replicated(), "out_mid": Replicated()}

    @classmethod
    def positions(cls, heads: EvenSplit) -> Entries:
        local = LocalAttributes({"config.num_attention_heads": heads.local_count})
        return {"self_attn": local, "self_attn.rel_pos_emb": SharedOutput()}


class GraniteSpeech5Encoder(GraniteSpeech5Parallel, hf.GraniteSpeech5Encoder):
    pass


class GraniteSpeech5ForCTC(GraniteSpeech5Parallel, hf.GraniteSpeech5ForCTC):
    head_plan = {"ctc_head": Replicated()}
