"""EncoderDecoder: an encoder of this table, and a decoder of it with cross-attention."""

from typing import Any

from transformers import EncoderDecoderConfig
from transformers.models.encoder_decoder import modeling_encoder_decoder as hf

from oslo_models.auto import AutoModel, AutoModelForCausalLM
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.composite import plan_of_part
from oslo_models.sharding.plan import Plan, Replicated

DECODED = {"attentions": "decoder_attentions", "cross_attentions": "cross_attentions"}


class EncoderDecoderParallel(ParallelModel):
    """Sharding plan of the EncoderDecoder family: the plans of its encoder and its decoder."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder = AutoModel.class_for(config.encoder), AutoModelForCausalLM.class_for(config.decoder)
        name = "enc_to_dec_proj"  # if their hidden sizes differ
        between = Plan(embed={}, blocks={}, head={}, optional=(name,)).with_rules(on_every_stage={name: Replicated()})
        encoding = plan_of_part("encoder", encoder, config.encoder, {"attentions": "encoder_attentions"})
        return encoding | plan_of_part("decoder", decoder, config.decoder, DECODED) | between


class EncoderDecoderModel(EncoderDecoderParallel, hf.EncoderDecoderModel):
    pass
