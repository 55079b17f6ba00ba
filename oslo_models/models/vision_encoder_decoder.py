"""VisionEncoderDecoder: an encoder of images of this table, and a decoder of it with cross-attention."""

from transformers import VisionEncoderDecoderConfig
from transformers.models.vision_encoder_decoder import modeling_vision_encoder_decoder as hf

from oslo_models.models.encoder_decoder import EncoderDecoderParallel


class VisionEncoderDecoderModel(EncoderDecoderParallel, hf.VisionEncoderDecoderModel):
    pass
