"""BiT: ResNet with standardised weights and norms of groups of channels, between which ranks gather the channels."""

from typing import Any

from torch import Tensor, nn
from transformers import BitConfig
from transformers.models.bit import modeling_bit as hf

from oslo_models.distributed.autograd_collectives import copy_to, gather_from
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated
from oslo_models.layers.kinds import ShardedModule, shards
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER


class GatheredChannels(ColumnParallel):
    """Shard the output channels of a convolution between unsharded layers: all its outputs are read."""


@shards(GatheredChannels, nn.Conv2d)
class GatheredConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded output channels, which are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            local = super().forward(copy_to(self.tp, x))
        return gather_from(self.tp, local, 1, [stop - start for ((start, stop),) in self.layouts["weight"].ranges])


class BitParallel(ParallelModel):
    """Sharding plan of the BiT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block: Entries = {
            **{f"conv{index}": GatheredChannels(channels=True) for index in (1, 2, 3)},
            **{f"norm{index}": Norm() for index in (1, 2, 3)},
            "downsample": Replicated(),
        }
        stages = [f"encoder.stages.{stage}.layers" for stage in range(len(config.depths))]
        return Plan(
            embed={"embedder": Replicated()},
            blocks=dict.fromkeys(stages, block),
            head={"norm": Norm()},
            optional=("downsample", "norm"),
        ).with_rules(single_stage_reason=SMALLER)


class BitModel(BitParallel, hf.BitModel):
    pass


class BitForImageClassification(BitParallel, hf.BitForImageClassification):
    head_plan = CLASSIFIER
