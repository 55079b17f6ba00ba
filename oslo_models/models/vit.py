"""ViT: an encoder of patches of images. The convolution that embeds them is whole on every rank."""

from math import prod
from typing import Any, ClassVar

from transformers.models.vit import modeling_vit as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row

HEADS: dict[str, Entries] = {
    "Model": {},
    "ForImageClassification": {"classifier": Replicated()},
    "ForMaskedImageModeling": {"decoder": Replicated()},
    "ForImageClassificationWithTeacher": {f"{kind}_classifier": Replicated() for kind in ("cls", "distillation")},
}
MASKED = {"loss_inputs": ("bool_masked_pos",), "has_loss_of_rows": False}  # a mean over masked pixels, nearly


class ViTParallel(ParallelModel):
    """How every model of the ViT family divides.

    Attributes:
        extra: how many positions there are beside those of the patches.
    """

    extra: ClassVar[int] = 1

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = Units(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
        block = {
            "layernorm_before": Norm(),
            **{f"attention.{name}_proj": Column(heads) for name in "qkv"},
            "attention.o_proj": Row(heads),
            "layernorm_after": Norm(),
            "mlp.fc1": Column(),
            "mlp.fc2": Row(),
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


globals().update(family(ViTParallel, hf, HEADS, ForMaskedImageModeling=MASKED))
