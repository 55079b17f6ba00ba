"""RT-DETR: Deformable DETR that encodes the smallest features. Convolutions are replicated. Its loss needs scipy."""

from typing import Any, ClassVar

from transformers import RTDetrConfig
from transformers.models.rt_detr import modeling_rt_detr as hf

from oslo_models.layers.entries import Entries, Replicated
from oslo_models.models.deformable_detr import DeformableDetrParallel
from oslo_models.sharding.layout import EvenSplit


class RTDetrParallel(DeformableDetrParallel):
    """Sharding plan of the RT-DETR family."""

    images = (
        *("backbone", "encoder_input_proj", "encoder", "decoder_input_proj", "denoising_class_embed"),
        *("weight_embedding", "enc_output", "enc_score_head", "enc_bbox_head"),
    )
    after: ClassVar[Entries] = dict.fromkeys(
        ("decoder.query_pos_head", "decoder.class_embed", "decoder.bbox_embed"), Replicated()
    )
    optional = ("denoising_class_embed", "weight_embedding", "decoder.class_embed", "decoder.bbox_embed")
    sampling = {"decoder": "encoder_attn"}

    @classmethod
    def stacks(cls, config: Any) -> dict[str, str]:
        encoders = (f"encoder.aifi.{number}.layers" for number in range(len(config.encode_proj_layers)))
        return {**dict.fromkeys(encoders, "encoder"), "decoder.layers": "decoder"}

    @classmethod
    def heads(cls, config: Any, stack: str) -> EvenSplit:
        if stack == "decoder":
            return super().heads(config, stack)
        return EvenSplit(config.encoder_attention_heads, config.encoder_hidden_dim // config.encoder_attention_heads)


class RTDetrModel(RTDetrParallel, hf.RTDetrModel):
    pass


class RTDetrForObjectDetection(RTDetrParallel, hf.RTDetrForObjectDetection):
    pass
