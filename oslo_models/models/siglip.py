"""SigLIP: CLIP without a class token; an attention layer, replicated on every rank, pools the patches."""

from typing import Any, ClassVar

from transformers import SiglipConfig, SiglipTextConfig, SiglipVisionConfig
from transformers.models.siglip import modeling_siglip as hf

from oslo_models.layers.entries import Entries, Norm, Replicated
from oslo_models.models.clip import TEXT, VISION, CLIPParallel

POOLED: Entries = {"post_layernorm": Norm(), "head": Replicated()}
VISUAL: Entries = {f"{VISION}.{name}": entry for name, entry in POOLED.items()}


def _pools(config: Any) -> bool:
    """Return whether the image encoder pools its patches, the default of older configurations."""
    return getattr(config, "vision_use_head", True)


class SiglipParallel(CLIPParallel):
    """Sharding plan of the SigLIP family."""

    image_embed: ClassVar[Entries] = {"embeddings": Replicated()}
    text_head = {"final_layer_norm": Norm(), "head": Replicated()}
    extra_positions = 0


class SiglipPairParallel(SiglipParallel):
    """Sharding plan of the two encoders with the contrastive loss."""

    head_plan = {**VISUAL, "logit_scale": Replicated(), "logit_bias": Replicated()}
    loss_is_mean = False


class SiglipTextParallel(SiglipParallel):
    """Sharding plan of the text encoder."""

    encoders = {TEXT: ""}


class SiglipVisionParallel(SiglipParallel):
    """Sharding plan of the image encoder."""

    encoders = {VISION: ""}

    @classmethod
    def head_entries(cls, config: Any) -> Entries:
        return POOLED if _pools(config) else {"post_layernorm": Norm()}


class SiglipClassifierParallel(SiglipParallel):
    """Sharding plan of the image encoder with a classifier."""

    encoders = {VISION: f"{VISION}."}

    @classmethod
    def head_entries(cls, config: Any) -> Entries:
        own = VISUAL if _pools(config.vision_config) else {f"{VISION}.post_layernorm": Norm()}
        return {**own, "classifier": Replicated()}


class SiglipModel(SiglipPairParallel, hf.SiglipModel):
    pass


class SiglipTextModel(SiglipTextParallel, hf.SiglipTextModel):
    pass


class SiglipVisionModel(SiglipVisionParallel, hf.SiglipVisionModel):
    pass


class SiglipForImageClassification(SiglipClassifierParallel, hf.SiglipForImageClassification):
    pass
