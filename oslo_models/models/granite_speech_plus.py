"""Granite Speech Plus: Granite Speech whose Q-Former also reads hidden states of inner encoder blocks."""

from transformers import GraniteSpeechPlusConfig, GraniteSpeechPlusEncoderConfig
from transformers.models.granite_speech_plus import modeling_granite_speech_plus as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.granite_speech import GraniteSpeechEncoderParallel, GraniteSpeechParallel


class GraniteSpeechPlusCTCEncoder(GraniteSpeechEncoderParallel, hf.GraniteSpeechPlusCTCEncoder):
    pass


class GraniteSpeechPlusParallel(GraniteSpeechParallel):
    """Sharding plan of the Granite Speech Plus family."""

    classes = {"encoder": GraniteSpeechPlusCTCEncoder}


class GraniteSpeechPlusModel(GraniteSpeechPlusParallel, hf.GraniteSpeechPlusModel):
    pass


class GraniteSpeechPlusForConditionalGeneration(
    GraniteSpeechPlusParallel, hf.GraniteSpeechPlusForConditionalGeneration
):
    head_plan = LM_HEAD
