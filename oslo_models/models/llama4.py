"""Llama 4: an encoder with rotary positions in two dimensions, a projector and the text model with its head."""

from typing import Any

from transformers import Llama4Config, Llama4VisionConfig
from transformers.models.llama4 import modeling_llama4 as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.models.llava import LlavaParallel


class Llama4VisionModel(ParallelModel, hf.Llama4VisionModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "input_layernorm": Norm(),
            **qkv("self_attn", heads),
            "self_attn.o_proj": RowParallel(heads),
            "post_attention_layernorm": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        tables = ("patch_embedding", "class_embedding", "positional_embedding_vlm")
        return Plan(
            embed={**dict.fromkeys(tables, Replicated()), "layernorm_pre": Norm()},
            blocks={"model.layers": block},
            head={"layernorm_post": Norm(), "vision_adapter": Replicated()},
        ).with_rules(single_stage_reason="it adds the class token and positions outside of its embedding")


class Llama4ForConditionalGeneration(LlavaParallel, hf.Llama4ForConditionalGeneration):
    decoder = "language_model.model"
    towers = {"vision_model": "vision_config"}
    classes = {"vision_model": Llama4VisionModel}
    head_plan = {"language_model.lm_head": VocabParallel()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="its decoder has the head inside")
