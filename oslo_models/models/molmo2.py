"""Molmo 2: an encoder of patches, attention that pools them, and Qwen3, or OLMo 2, with further embeddings."""

from dataclasses import replace
from typing import Any

from transformers import Molmo2Config, Molmo2TextConfig, Molmo2VisionConfig
from transformers.models.molmo2 import modeling_molmo2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, HeadNorm, Plan, Replicated, RowParallel, WidthNorm
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import GroupedHeads


class Molmo2VisionModel(LlamaParallel, hf.Molmo2VisionModel):
    norms = ("layer_norm1", "layer_norm2")
    mlp = {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed = dict.fromkeys(("positional_embedding", "patch_embedding"), Replicated())
        return replace(super().plan(config), embed=embed, head={}).with_rules(
            input_positions={"layers": lambda batch: batch["pixel_values"].shape[:2]}
        )


class Molmo2TextModel(LlamaParallel, hf.Molmo2TextModel):
    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        of_heads = config.qk_norm_type == "qwen3"
        norms = {
            "self_attn.q_norm": HeadNorm() if of_heads else WidthNorm(heads.query),
            "self_attn.k_norm": HeadNorm() if of_heads else WidthNorm(heads.key_value),
        }
        return {**super().attention(config, heads), **norms}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        some = 0 < len(config.rope_scaling_layers) < config.num_hidden_layers
        reason = "with rope_scaling_layers of some blocks, each stage would number its blocks anew" if some else ""
        return super().plan(config).with_rules(single_stage_reason=reason)


class Molmo2Parallel(LlavaParallel):
    """Sharding plan of the Molmo 2 family."""

    classes = {"language_model": Molmo2TextModel, "vision_tower": Molmo2VisionModel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return (
            super()
            .plan(config)
            .with_rules(single_stage_reason="one of its arguments numbers the patches of all images of a batch")
        )


class Molmo2Model(Molmo2Parallel, hf.Molmo2Model):
    pass


class Molmo2ForConditionalGeneration(Molmo2Parallel, hf.Molmo2ForConditionalGeneration):
    head_plan = LM_HEAD
