"""Inkling 2: an encoder of image patches with scaled residuals, and the text model."""

from typing import Any

from transformers import Inkling2Config, Inkling2VisionConfig
from transformers.models.inkling2 import modeling_inkling2 as hf

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.step3p7 import ScaledResidualsParallel


class Inkling2VisionModel(ScaledResidualsParallel, hf.Inkling2VisionModel):
    head_plan = {"merger": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        block = {**plan.blocks["layers"], "self_attn": LocalAttributes({"num_heads": heads_of(config).local_count})}
        return Plan(plan.embed, {"layers": block}, plan.head).with_rules(
            single_stage_reason="the patches of all images are one row"
        )


class Inkling2WithImagesParallel(LlavaParallel):
    """Sharding plan of the Inkling 2 family with images."""

    projectors = {}


class Inkling2Model(Inkling2WithImagesParallel, hf.Inkling2Model):
    pass


class Inkling2ForConditionalGeneration(Inkling2WithImagesParallel, hf.Inkling2ForConditionalGeneration):
    head_plan = LM_HEAD
