"""Phi-4 Multimodal: Phi-3 with the encoder of SigLIP, and an encoder of sounds, which every rank holds."""

from dataclasses import replace
from typing import Any

from transformers import Phi4MultimodalConfig
from transformers.models.phi4_multimodal import modeling_phi4_multimodal as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.phi3 import Phi3Parallel
from oslo_models.models.siglip import SiglipVisionParallel


class Phi4MultimodalParallel(Phi3Parallel):
    """Sharding plan of the Phi-4 Multimodal family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, tower = super().plan(config), SiglipVisionParallel.plan(config.vision_config)
        tower = replace(tower, head=SiglipVisionParallel.head_entries(config.vision_config))
        name = "embed_tokens_extend.image_embed.img_processor"
        return replace(
            plan,
            embed={**plan.embed, "embed_tokens_extend": Replicated()},
            towers={name: tower.under(f"{name}.")},
        ).with_rules(single_stage_reason="its configuration has no token of images, by which stages would divide them")


class Phi4MultimodalModel(Phi4MultimodalParallel, hf.Phi4MultimodalModel):
    pass


class Phi4MultimodalForCausalLM(Phi4MultimodalParallel, hf.Phi4MultimodalForCausalLM):
    head_plan = LM_HEAD
