"""I-JEPA: ViT without a class token."""

from transformers import IJepaConfig
from transformers.models.ijepa import modeling_ijepa as hf

from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.vit import ViTParallel


class IJepaParallel(ViTParallel):
    """Sharding plan of the I-JEPA family."""

    extra_positions = 0


class IJepaModel(IJepaParallel, hf.IJepaModel):
    pass


class IJepaForImageClassification(IJepaParallel, hf.IJepaForImageClassification):
    head_plan = CLASSIFIER
