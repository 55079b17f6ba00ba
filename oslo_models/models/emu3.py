"""Emu3: Llama with codes of images among its tokens. Every rank holds the model that makes codes."""

from typing import Any

from transformers import Emu3Config, Emu3TextConfig
from transformers.models.emu3 import modeling_emu3 as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel


class Emu3TextModel(LlamaParallel, hf.Emu3TextModel):
    pass


class Emu3Parallel(LlavaParallel):
    """Sharding plan of the Emu3 family."""

    decoder_name = "text_model"
    towers = {}
    projectors = {"vqmodel": Replicated()}
    classes = {"text_model": Emu3TextModel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="its codes depend on all images of a batch")


class Emu3Model(Emu3Parallel, hf.Emu3Model):
    pass


class Emu3ForConditionalGeneration(Emu3Parallel, hf.Emu3ForConditionalGeneration):
    head_plan = LM_HEAD
