"""MobileViTV2: MobileViT with MLPs of convolutions. Attention, without heads, and convolutions around it are whole."""

from typing import Any

from transformers import MobileViTV2Config
from transformers.models.mobilevitv2 import modeling_mobilevitv2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.mobilevit import downsampling, inverted_residual
from oslo_models.models.resnet import SMALLER


class MobileViTV2Parallel(ParallelModel):
    """Sharding plan of the MobileViTV2 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        stages = [f"encoder.layer.{stage}" for stage in range(2, 5)]
        block: Entries = {
            "layernorm_before": Norm(),
            "attention": Replicated(),
            "layernorm_after": Norm(),
            "ffn.conv1.convolution": ColumnParallel(channels=True),
            "ffn.conv2.convolution": RowParallel(channels=True),
        }
        around = ("conv_kxk", "conv_1x1", "conv_projection")
        return Plan(
            embed={
                "conv_stem": Replicated(),
                **{f"{stage}.{part}": Replicated() for stage in stages for part in around},
                **downsampling(stages),
            },
            blocks={
                **{f"encoder.layer.{stage}.layer": inverted_residual() for stage in range(2)},
                **{f"{stage}.transformer.layer": block for stage in stages},
            },
            head={f"{stage}.layernorm": Norm() for stage in stages},
        ).with_rules(single_stage_reason=SMALLER)


class MobileViTV2Model(MobileViTV2Parallel, hf.MobileViTV2Model):
    pass


class MobileViTV2ForImageClassification(MobileViTV2Parallel, hf.MobileViTV2ForImageClassification):
    head_plan = CLASSIFIER


class MobileViTV2ForSemanticSegmentation(MobileViTV2Parallel, hf.MobileViTV2ForSemanticSegmentation):
    head_plan = {"segmentation_head": Replicated()}
