"""Qwen3-VL: an encoder of image patches, and a decoder whose first blocks add features of several encoder blocks."""

from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

from oslo_models.layers.entries import ColumnParallel, Plan, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.qwen2_vl import QwenEncoderParallel
from oslo_models.models.qwen3 import Qwen3Parallel


class Qwen3VLParallel(LlavaParallel):
    """Sharding plan of the Qwen3-VL family."""

    towers = {"visual": "vision_config"}
    projectors = {}


class Qwen3VLVisionModel(QwenEncoderParallel, hf.Qwen3VLVisionModel):
    mlp = {"mlp.linear_fc1": ColumnParallel(), "mlp.linear_fc2": RowParallel()}
    positions = {"pos_embed": Replicated()}
    mergers = {"merger": Replicated(), "deepstack_merger_list": Replicated()}


class Qwen3VLTextModel(Qwen3Parallel, hf.Qwen3VLTextModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="the first blocks read features of the encoder")


class Qwen3VLModel(Qwen3VLParallel, hf.Qwen3VLModel):
    pass


class Qwen3VLForConditionalGeneration(Qwen3VLParallel, hf.Qwen3VLForConditionalGeneration):
    head_plan = LM_HEAD
