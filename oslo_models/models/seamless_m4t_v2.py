"""SeamlessM4T v2: SeamlessM4T with units of speech in parallel. Convolutions are replicated."""

from typing import Any

from transformers import SeamlessM4Tv2Config
from transformers.models.seamless_m4t_v2 import modeling_seamless_m4t_v2 as hf

from oslo_models.layers.entries import Entries, LocalAttributes, Norm, Replicated, RowParallel
from oslo_models.modeling.blocks import qkv
from oslo_models.models.seamless_m4t import DECODER, SPEECH, TEXT, UNITS, SeamlessM4TParallel
from oslo_models.sharding.layout import EvenSplit


class SeamlessM4Tv2Parallel(SeamlessM4TParallel):
    """Sharding plan of the SeamlessM4T v2 family."""

    @classmethod
    def block(cls, config: Any, stack: str) -> Entries:
        if stack != "t2u_decoder":
            return super().block(config, stack)
        heads = cls.heads(config, stack)
        return {
            **qkv("self_attn", heads),
            "self_attn.out_proj": RowParallel(heads),
            **dict.fromkeys(("self_attn_layer_norm", "conv_layer_norm"), Norm()),
            **dict.fromkeys(("conv1", "conv2"), Replicated()),
        }

    @classmethod
    def speech_heads(cls, heads: EvenSplit) -> Entries:
        return {"self_attn": LocalAttributes({"num_heads": heads.local_count})}


class SeamlessM4Tv2Model(SeamlessM4Tv2Parallel, hf.SeamlessM4Tv2Model):
    pass


class SeamlessM4Tv2ForTextToText(SeamlessM4Tv2Parallel, hf.SeamlessM4Tv2ForTextToText):
    parts = (TEXT, DECODER)


class SeamlessM4Tv2ForSpeechToText(SeamlessM4Tv2Parallel, hf.SeamlessM4Tv2ForSpeechToText):
    parts = (SPEECH, DECODER)


class SeamlessM4Tv2ForTextToSpeech(SeamlessM4Tv2Parallel, hf.SeamlessM4Tv2ForTextToSpeech):
    parts = (TEXT, DECODER, UNITS)


class SeamlessM4Tv2ForSpeechToSpeech(SeamlessM4Tv2Parallel, hf.SeamlessM4Tv2ForSpeechToSpeech):
    parts = (SPEECH, DECODER, UNITS)
