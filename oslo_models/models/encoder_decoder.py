"""EncoderDecoder: an encoder of this table, and a decoder of it that attends to what the encoder made."""

from typing import Any

from transformers import EncoderDecoderConfig
from transformers.models.encoder_decoder import modeling_encoder_decoder as hf

from oslo_models.auto import AutoModel, AutoModelForCausalLM
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.composite import part
from oslo_models.sharding.plan import Plan, Replicated

DECODED = {"attentions": "decoder_attentions", "cross_attentions": "cross_attentions"}


class EncoderDecoderParallel(ParallelModel):
    """How every model of the EncoderDecoder family divides: as its encoder and its decoder do."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder = AutoModel.class_for(config.encoder), AutoModelForCausalLM.class_for(config.decoder)
        name = "enc_to_dec_proj"  # if they are not equally wide
        between = Plan(embed={}, blocks={}, head={}, beside={name: Replicated()}, optional=(name,))
        reads = part("encoder", encoder, config.encoder, {"attentions": "encoder_attentions"})
        return reads | part("decoder", decoder, config.decoder, DECODED) | between


class EncoderDecoderModel(EncoderDecoderParallel, hf.EncoderDecoderModel):
    pass
