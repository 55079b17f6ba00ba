"""ViT MSN: ViT with another training objective."""

from transformers import ViTMSNConfig
from transformers.models.vit_msn import modeling_vit_msn as hf

from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.vit import ViTParallel


class ViTMSNModel(ViTParallel, hf.ViTMSNModel):
    pass


class ViTMSNForImageClassification(ViTParallel, hf.ViTMSNForImageClassification):
    head_plan = CLASSIFIER
