"""DeiT: ViT with a second position that stands for the image, by which it learns from a teacher."""

from transformers.models.deit import modeling_deit as hf

from oslo_models.models.family import family
from oslo_models.models.vit import HEADS, MASKED, ViTParallel


class DeiTParallel(ViTParallel):
    """How every model of the DeiT family divides."""

    extra = 2


globals().update(family(DeiTParallel, hf, HEADS, ForMaskedImageModeling=MASKED))
