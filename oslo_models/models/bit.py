"""BiT: ResNet with standardised weights and norms of groups of channels, between which ranks gather the channels."""

from typing import Any

from transformers import BitConfig
from transformers.models.bit import modeling_bit as hf

from oslo_models.layers.entries import Entries, GatheredChannels, Norm, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER


class BitParallel(ParallelModel):
    """Sharding plan of the BiT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        block: Entries = {
            **{f"conv{index}": GatheredChannels() for index in (1, 2, 3)},
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
