"""ViT MAE: ViT on some patches, drawn at random. The decoder for pretraining is replicated on every rank."""

from typing import Any

from transformers import ViTMAEConfig
from transformers.models.vit_mae import modeling_vit_mae as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.models.vit import ViTParallel


class ViTMAEParallel(ViTParallel):
    """Sharding plan of the ViT MAE family."""

    # transformers leaves them as constructed
    zeros = tuple(f"{base}embeddings.{name}" for base in ("", "vit.") for name in ("cls_token", "position_embeddings"))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="its embedding returns the drawn places, too")


class ViTMAEModel(ViTMAEParallel, hf.ViTMAEModel):
    pass


class ViTMAEForPreTraining(ViTMAEParallel, hf.ViTMAEForPreTraining):
    head_plan = {"decoder": Replicated()}
    loss_is_mean = False
