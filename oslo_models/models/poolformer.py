"""PoolFormer: mean pooling in place of attention, between sharded MLPs."""

from typing import Any

from torch import Tensor, nn
from transformers import PoolFormerConfig
from transformers.models.poolformer import modeling_poolformer as hf

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.layers.kinds import ShardedModule, shards
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER


class SharedDrops(ColumnParallel):
    """Sharded output channels, before a layer that drops whole rows: all ranks draw the same numbers."""


@shards(SharedDrops, nn.Conv2d)
class ConvolutionBeforeDrops(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded output channels."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return super().forward(copy_to(self.tp, x))


class PoolFormerParallel(ParallelModel):
    """Sharding plan of the PoolFormer family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        scales = ("layer_scale_1", "layer_scale_2")
        block: Entries = {
            "before_norm": Norm(),
            "after_norm": Norm(),
            "output.conv1": SharedDrops(channels=True),
            "output.conv2": RowParallel(channels=True),
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
