"""SegFormer: MLPs with a convolution; attention, of one head in the first blocks, and the decoder are replicated."""

from typing import Any

from transformers import SegformerConfig
from transformers.models.segformer import modeling_segformer as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit


class SegformerParallel(ParallelModel):
    """Sharding plan of the SegFormer family."""

    @classmethod
    def block(cls, channels: EvenSplit) -> Entries:
        """Return the plan of a block with MLPs of this width."""
        return {
            "layernorm_before": Norm(),
            "attention": Replicated(),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.dwconv.dwconv": LocalAttributes({"groups": channels.local_count}),
            "mlp.dwconv.dwconv.weight": ColumnParallel(),
            "mlp.dwconv.dwconv.bias": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        stages = [f"stages.{stage}" for stage in range(config.num_encoder_blocks)]
        widths = zip(stages, config.hidden_sizes, config.mlp_ratios, strict=False)
        blocks = {f"{stage}.blocks": cls.block(EvenSplit(int(width * ratio))) for stage, width, ratio in widths}
        return Plan(
            embed={f"{stage}.patch_embeddings": Replicated() for stage in stages},
            blocks=blocks,
            head={f"{stage}.layer_norm": Norm() for stage in stages},
        ).with_rules(single_stage_reason="images become smaller between its blocks")


class SegformerModel(SegformerParallel, hf.SegformerModel):
    pass


class SegformerForImageClassification(SegformerParallel, hf.SegformerForImageClassification):
    head_plan = CLASSIFIER


class SegformerForSemanticSegmentation(SegformerParallel, hf.SegformerForSemanticSegmentation):
    head_plan = {"decode_head": Replicated()}
