"""EncoderDecoder: an encoder of this table, and a decoder of it with cross-attention."""

from collections.abc import Collection
from typing import Any

from transformers import EncoderDecoderConfig
from transformers.models.encoder_decoder import modeling_encoder_decoder as hf

from oslo_models.auto import AutoModel, AutoModelForCausalLM
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.composite import plan_of_part, replicated_in_part
from oslo_models.sharding.plan import Plan, Replicated

ENCODED = {"attentions": "encoder_attentions"}
DECODED = {"attentions": "decoder_attentions", "cross_attentions": "cross_attentions"}


class EncoderDecoderParallel(ParallelModel):
    """Sharding plan of the EncoderDecoder family: the plans of its encoder and its decoder."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder = cls._parts(config)
        name = "enc_to_dec_proj"  # if their hidden sizes differ
        between = Plan(embed={}, blocks={}, head={}, optional=(name,)).with_rules(on_every_stage={name: Replicated()})
        encoding = plan_of_part("encoder", encoder, config.encoder)
        plan = encoding | plan_of_part("decoder", decoder, config.decoder) | between
        return plan.with_rules(early_outputs={})  # the decoder reads the last hidden states only

    @classmethod
    def replicated_attentions(cls, config: Any) -> Collection[str]:
        encoder, decoder = cls._parts(config)
        encoded = replicated_in_part(encoder, config.encoder, ENCODED)
        return [*encoded, *replicated_in_part(decoder, config.decoder, DECODED)]

    @staticmethod
    def _parts(config: Any) -> tuple[type[ParallelModel], type[ParallelModel]]:
        return AutoModel.class_for(config.encoder), AutoModelForCausalLM.class_for(config.decoder)


class EncoderDecoderModel(EncoderDecoderParallel, hf.EncoderDecoderModel):
    pass
