"""ConvNeXt: convolutions over each channel, replicated on every rank, between MLPs; no attention."""

from typing import Any, ClassVar

from transformers import ConvNextConfig
from transformers.models.convnext import modeling_convnext as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER


class ConvNextParallel(ParallelModel):
    """Sharding plan of the ConvNeXt family.

    Attributes:
        block: the entries of a block.
    """

    block: ClassVar[Entries] = {
        "dwconv": Replicated(),
        "layernorm": Norm(),
        "pwconv1": ColumnParallel(),
        "pwconv2": RowParallel(),
        "layer_scale_parameter": Replicated(),
    }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        stages = [f"encoder.stages.{stage}" for stage in range(config.num_stages)]
        smaller = {f"{stage}.downsampling_layer": Replicated() for stage in stages}
        return Plan(
            embed={"embeddings": Replicated(), **smaller},
            blocks={f"{stage}.layers": cls.block for stage in stages},
            head={"layernorm": Norm()},
            optional=("layer_scale_parameter", *smaller),
        ).with_rules(single_stage_reason="images become smaller between its blocks")


class ConvNextModel(ConvNextParallel, hf.ConvNextModel):
    pass


class ConvNextForImageClassification(ConvNextParallel, hf.ConvNextForImageClassification):
    head_plan = CLASSIFIER
