"""FocalNet: convolutions of several widths in place of attention, replicated on every rank, and sharded MLPs."""

from typing import Any

from transformers import FocalNetConfig
from transformers.models.focalnet import modeling_focalnet as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER


class FocalNetParallel(ParallelModel):
    """Sharding plan of the FocalNet family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        scales = ("gamma_1", "gamma_2")
        block = {
            "norm1": Norm(),
            "modulation": Replicated(),
            "norm2": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            **dict.fromkeys(scales, Replicated()),
        }
        stages = [f"encoder.stages.{stage}" for stage in range(len(config.depths))]
        merging = {f"{stage}.downsample": Replicated() for stage in stages[:-1]}
        return Plan(
            embed={"embeddings": Replicated(), **merging},
            blocks={f"{stage}.layers": block for stage in stages},
            head={"layernorm": Norm()},
            optional=scales,
        ).with_rules(single_stage_reason="images become smaller between its blocks")


class FocalNetModel(FocalNetParallel, hf.FocalNetModel):
    pass


class FocalNetForMaskedImageModeling(FocalNetParallel, hf.FocalNetForMaskedImageModeling):
    head_plan = {"decoder": Replicated()}


class FocalNetForImageClassification(FocalNetParallel, hf.FocalNetForImageClassification):
    head_plan = CLASSIFIER
