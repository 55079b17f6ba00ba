"""ViT: an encoder of patches of images. The convolution that embeds them is whole on every rank."""

from math import prod
from typing import Any, ClassVar

from transformers import ViTConfig
from transformers.models.vit import modeling_vit as hf

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Norm, Plan, Replicated, RowParallel


class ViTParallel(ParallelModel):
    """How every model of the ViT family divides.

    Attributes:
        extra: how many positions there are beside those of the patches.
    """

    extra: ClassVar[int] = 1

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {
            "layernorm_before": Norm(),
            **{f"attention.{name}_proj": ColumnParallel(heads) for name in "qkv"},
            "attention.o_proj": RowParallel(heads),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        patch = config.patch_size if isinstance(config.patch_size, (tuple, list)) else (config.patch_size,) * 2

        def positions(batch: Any) -> tuple[int, int]:
            rows, _, *sizes = batch["pixel_values"].shape
            return rows, cls.extra + prod(size // side for size, side in zip(sizes, patch, strict=True))

        return Plan(
            embed={"embeddings": Replicated()},
            blocks={"layers": block},
            head={"layernorm": Norm(), "pooler": Replicated()},
            optional=("pooler",),
            positions={"layers": positions},
        )


class ViTModel(ViTParallel, hf.ViTModel):
    pass


class ViTForImageClassification(ViTParallel, hf.ViTForImageClassification):
    head_plan = CLASSIFIER


class ViTForMaskedImageModeling(ViTParallel, hf.ViTForMaskedImageModeling):
    head_plan = {"decoder": Replicated()}
    loss_inputs = ("bool_masked_pos",)
    loss_is_mean = False
