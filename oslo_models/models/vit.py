"""ViT: an encoder of image patches. The patch embedding is replicated on every rank."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

from transformers import ViTConfig
from transformers.models.vit import modeling_vit as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.pipeline_rules import InputPositions


def patch_positions(patch_size: int | Sequence[int], extra_positions: int) -> InputPositions:
    """Return the rule for the positions of images: one for each patch, and some without a patch."""
    patch = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size

    def positions(batch: Mapping[str, Any]) -> tuple[int, int]:
        rows, _, *sizes = batch["pixel_values"].shape
        return rows, extra_positions + prod(size // side for size, side in zip(sizes, patch, strict=True))

    return positions


class ViTParallel(ParallelModel):
    """Sharding plan of the ViT family.

    Attributes:
        extra_positions: number of positions without a patch, such as the class token.
    """

    extra_positions: ClassVar[int] = 1

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "layernorm_before": Norm(),
            **qkv("attention", heads),
            "attention.o_proj": RowParallel(heads),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        return Plan(
            embed={"embeddings": Replicated()},
            blocks={"layers": block},
            head={"layernorm": Norm(), "pooler": Replicated()},
            optional=("pooler",),
        ).with_rules(input_positions={"layers": patch_positions(config.patch_size, cls.extra_positions)})


class ViTModel(ViTParallel, hf.ViTModel):
    pass


class ViTForImageClassification(ViTParallel, hf.ViTForImageClassification):
    head_plan = CLASSIFIER


class ViTForMaskedImageModeling(ViTParallel, hf.ViTForMaskedImageModeling):
    head_plan = {"decoder": Replicated()}
    loss_inputs = ("bool_masked_pos",)
    loss_is_mean = False
