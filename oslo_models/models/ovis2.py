"""Ovis2: an encoder of mixtures of the words of a visual vocabulary, and a decoder."""

from typing import Any

from transformers import Ovis2Config
from transformers.models.ovis2 import modeling_ovis2 as hf

from oslo_models.layers.entries import Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.vit import patch_positions


class Ovis2VisionParallel(ParallelModel):
    """Sharding plan of the encoder."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, stack = heads_of(config), "transformer.encoder.layers"
        block = {
            "rms_norm1": Norm(),
            **qkv("attention", heads),
            "attention.out_proj": RowParallel(heads),
            "rms_norm2": Norm(),
            **gated_mlp("ffn"),
        }
        return Plan(
            embed={"transformer.embeddings": Replicated()},
            blocks={stack: block},
            head={"transformer.rms_norm": Norm(), "head_linear": Replicated(), "head_norm": Norm()},
        ).with_rules(input_positions={stack: patch_positions(config.patch_size, extra_positions=0)})


class Ovis2Parallel(LlavaParallel):
    """Sharding plan of the Ovis2 family."""

    projectors = {"visual_embeddings_table": Replicated()}
    classes = {"vision_tower": Ovis2VisionParallel}


class Ovis2Model(Ovis2Parallel, hf.Ovis2Model):
    pass


class Ovis2ForConditionalGeneration(Ovis2Parallel, hf.Ovis2ForConditionalGeneration):
    head_plan = LM_HEAD
