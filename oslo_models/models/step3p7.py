"""Step 3.7: an encoder of an image and its tiles, two convolutions, and Laguna's attention and mixture of experts."""

from dataclasses import replace
from typing import Any

from transformers import Step3p7Config, Step3p7TextConfig, Step3p7VisionConfig
from transformers.models.step3p7 import modeling_step3p7 as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.laguna import LagunaParallel
from oslo_models.models.llava import LlavaParallel


class Step3p7VisionModel(ParallelModel, hf.Step3p7VisionModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "layernorm_before": Norm(),
            **qkv("self_attn", heads),
            "self_attn.out_proj": RowParallel(heads),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            **dict.fromkeys(("lambda_1", "lambda_2"), Replicated()),
        }
        return Plan(
            embed={"embeddings": Replicated(), "pre_layernorm": Norm()},
            blocks={"layers": block},
            head=dict.fromkeys(("downsampler1", "downsampler2"), Replicated()),
        ).with_rules(single_stage_reason="it reads the size of images between its blocks")


class Step3p7TextModel(LagunaParallel, hf.Step3p7TextModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        each = [config.per_layer_config[block] for block in range(config.num_hidden_layers)]
        overrides = [cls.attention(own, cls.heads(own)) for own in each]
        return replace(super(LagunaParallel, cls).plan(each[0]), block_overrides={"layers": overrides})


class Step3p7Parallel(LlavaParallel):
    """Sharding plan of the Step 3.7 family."""

    towers = {"vision_model": "vision_config"}
    classes = {"vision_model": Step3p7VisionModel, "language_model": Step3p7TextModel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="an image and its tiles are in different arguments")


class Step3p7Model(Step3p7Parallel, hf.Step3p7Model):
    pass


class Step3p7ForConditionalGeneration(Step3p7Parallel, hf.Step3p7ForConditionalGeneration):
    head_plan = LM_HEAD
