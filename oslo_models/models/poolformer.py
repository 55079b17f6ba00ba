"""PoolFormer: mean pooling in place of attention, between sharded MLPs."""

from typing import Any

from transformers import PoolFormerConfig
from transformers.models.poolformer import modeling_poolformer as hf

from oslo_models.layers.entries import ColumnChannels, Entries, Norm, Plan, Replicated, RowChannels
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER


class PoolFormerParallel(ParallelModel):
    """Sharding plan of the PoolFormer family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        scales = ("layer_scale_1", "layer_scale_2")
        block: Entries = {
            "before_norm": Norm(),
            "after_norm": Norm(),
            "output.conv1": ColumnChannels(drops_rows=True),
            "output.conv2": RowChannels(),
            **dict.fromkeys(scales, Replicated()),
        }
        stages = range(config.num_encoder_blocks)
        return Plan(
            embed={f"encoder.patch_embeddings.{stage}": Replicated() for stage in stages},
            blocks={f"encoder.block.{stage}": block for stage in stages},
            head={},
            optional=scales,
        ).with_rules(single_stage_reason=SMALLER)


class PoolFormerModel(PoolFormerParallel, hf.PoolFormerModel):
    pass


class PoolFormerForImageClassification(PoolFormerParallel, hf.PoolFormerForImageClassification):
    head_plan = {"norm": Norm(), **CLASSIFIER}
