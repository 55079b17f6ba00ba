"""Qwen3-VL: an encoder of image patches, and a decoder whose first blocks add features of several encoder blocks."""

from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLTextConfig, Qwen3VLVisionConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as hf

from oslo_models.layers.entries import ColumnParallel, Plan, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen2_vl import QwenEncoderParallel, QwenWithImagesParallel
from oslo_models.models.qwen3 import Qwen3Parallel


class Qwen3VLParallel(QwenWithImagesParallel):
    """Sharding plan of the Qwen3-VL family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        # Features of the encoder are added after these blocks, and are not part of the hidden states that they return.
        count = len(config.vision_config.deepstack_visual_indexes)
        return super().plan(config).with_rules(continued_blocks={"language_model.layers": range(1, count + 1)})


class Qwen3VLEncoderParallel(QwenEncoderParallel):
    """Sharding plan of the encoders of image patches in Qwen3-VL."""

    mlp = {"mlp.linear_fc1": ColumnParallel(), "mlp.linear_fc2": RowParallel()}
    positions = {"pos_embed": Replicated()}
    mergers = {"merger": Replicated(), "deepstack_merger_list": Replicated()}


class Qwen3VLVisionModel(Qwen3VLEncoderParallel, hf.Qwen3VLVisionModel):
    pass


class Qwen3VLTextModel(Qwen3Parallel, hf.Qwen3VLTextModel):
    pass


class Qwen3VLModel(Qwen3VLParallel, hf.Qwen3VLModel):
    pass


class Qwen3VLForConditionalGeneration(Qwen3VLParallel, hf.Qwen3VLForConditionalGeneration):
    head_plan = LM_HEAD
