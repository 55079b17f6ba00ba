"""GIT: a decoder with BERT's blocks that reads the patches of an image before its tokens."""

from dataclasses import replace
from typing import Any

from transformers import GitConfig, GitVisionConfig
from transformers.models.git import modeling_git as hf

from oslo_models.layers.entries import Norm, Plan, Replicated, VocabParallel
from oslo_models.models.bert import BertParallel
from oslo_models.models.clip import VISION, CLIPParallel


class GitVisionModel(CLIPParallel, hf.GitVisionModel):
    head_plan = {f"{VISION}.post_layernorm": Norm()}
    encoders = {VISION: f"{VISION}."}


class GitParallel(BertParallel):
    """Sharding plan of the GIT family."""

    added_embeddings = ("position",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, vision = super().plan(config), GitVisionModel.plan(config.vision_config)
        tower = replace(vision, head={**vision.head, **GitVisionModel.head_plan}).under("image_encoder.")
        between = dict.fromkeys(("visual_projection", "img_temporal_embedding"), Replicated())
        tower = replace(tower, head={**tower.head, **between})
        return replace(plan, head={}, towers={"image_encoder": tower}, optional=("img_temporal_embedding",)).with_rules(
            single_stage_reason="it puts the features of images before its tokens"
        )


class GitModel(GitParallel, hf.GitModel):
    pass


class GitForCausalLM(GitParallel, hf.GitForCausalLM):
    head_plan = {"output": VocabParallel()}
