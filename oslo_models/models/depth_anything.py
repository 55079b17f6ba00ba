"""Depth Anything: DINOv2 with replicated convolutions that join the outputs of several blocks."""

from typing import Any

from transformers import DepthAnythingConfig
from transformers.models.depth_anything import modeling_depth_anything as hf

from oslo_models.auto import AutoModel
from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.models.dpt import SEVERAL_BLOCKS


class DepthAnythingForDepthEstimation(ParallelModel, hf.DepthAnythingForDepthEstimation):
    head_plan = {"neck": Replicated(), "head": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan: Plan = AutoModel.class_for(config.backbone_config).plan(config.backbone_config)
        return plan.under("backbone.").with_rules(single_stage_reason=SEVERAL_BLOCKS)
