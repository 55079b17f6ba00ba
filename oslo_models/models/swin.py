"""Swin: ViT with attention in windows and biases of relative positions; patches are merged between some blocks."""

from typing import Any

from transformers import SwinConfig
from transformers.models.swin import modeling_swin as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit


class SwinParallel(ParallelModel):
    """Sharding plan of the Swin family."""

    @classmethod
    def block(cls, heads: EvenSplit) -> Entries:
        """Return the plan of a block with these heads."""
        return {
            "layernorm_before": Norm(),
            **qkv("attention", heads),
            "attention.o_proj": RowParallel(heads),
            "attention.relative_position_bias.relative_position_bias_table": ColumnParallel(
                EvenSplit(heads.count), dim=1
            ),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = [EvenSplit(count, config.embed_dim * 2**stage // count) for stage, count in enumerate(config.num_heads)]
        merging = [f"encoder.layers.{stage}.downsample" for stage in range(len(heads) - 1)]
        return Plan(
            embed={"embeddings": Replicated(), **dict.fromkeys(merging, Replicated())},
            blocks={f"encoder.layers.{stage}.blocks": cls.block(own) for stage, own in enumerate(heads)},
            head={"layernorm": Norm()},
        ).with_rules(single_stage_reason="patches are merged between its blocks")


class SwinModel(SwinParallel, hf.SwinModel):
    pass


class SwinForMaskedImageModeling(SwinParallel, hf.SwinForMaskedImageModeling):
    head_plan = {"decoder": Replicated()}


class SwinForImageClassification(SwinParallel, hf.SwinForImageClassification):
    head_plan = CLASSIFIER
