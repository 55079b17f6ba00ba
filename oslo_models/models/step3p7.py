"""Step 3.7: an encoder of patches with scaled residuals, a projector, and Qwen3 with gated attention and experts.

Blocks with sliding windows may have other heads.
"""

from dataclasses import replace
from typing import Any

from transformers import Step3p7Config, Step3p7TextConfig, Step3p7VisionConfig
from transformers.models.step3p7 import modeling_step3p7 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, heads_of, mixture_of_experts, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.vit import patch_positions
from oslo_models.sharding.layout import GroupedHeads


class ScaledResidualsParallel(ParallelModel):
    """Sharding plan of encoders of patches that scale the outputs of attention and MLP."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "layernorm_before": Norm(),
            **qkv("self_attn", heads),
            "self_attn.out_proj": RowParallel(heads),
            "lambda_1": Replicated(),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            "lambda_2": Replicated(),
        }
        embed = {"embeddings": Replicated(), "pre_layernorm": Norm()}
        return Plan(embed=embed, blocks={"layers": block}, head={}).with_rules(
            input_positions={"layers": patch_positions(config.patch_size, extra_positions=0)}
        )


class Step3p7VisionModel(ScaledResidualsParallel, hf.Step3p7VisionModel):
    head_plan = dict.fromkeys(("downsampler1", "downsampler2"), Replicated())


class Step3p7TextModel(LlamaParallel, hf.Step3p7TextModel):
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    # routed experts are scaled after their sum, so shared ones have a sum of their own
    mlp = {**LlamaParallel.mlp, **mixture_of_experts(), **gated_mlp("mlp.shared_experts")}
    optional = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        gates = replace(heads, head_dim=1)
        return {**super().attention(config, heads), "self_attn.g_proj": ColumnParallel(gates.query)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        each = [config.per_layer_config[block] for block in range(config.num_hidden_layers)]
        overrides = [cls.attention(own, cls.heads(own)) for own in each]
        return replace(super().plan(each[0]), block_overrides={"layers": overrides})


class Step3p7Parallel(LlavaParallel):
    """Sharding plan of the Step 3.7 family."""

    towers = {"vision_model": "vision_config"}
    classes = {"language_model": Step3p7TextModel, "vision_model": Step3p7VisionModel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="an image and its tiles are in different arguments")


class Step3p7Model(Step3p7Parallel, hf.Step3p7Model):
    pass


class Step3p7ForConditionalGeneration(Step3p7Parallel, hf.Step3p7ForConditionalGeneration):
    head_plan = LM_HEAD
