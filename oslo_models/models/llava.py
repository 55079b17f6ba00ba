"""LLaVA: a decoder that reads images through the tower of another model and a projector."""

from typing import Any, ClassVar

from transformers import LlavaConfig
from transformers.models.llava import modeling_llava as hf

from oslo_models.auto import AutoModel
from oslo_models.layers.entries import Entries, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.composite import plan_with_towers
from oslo_models.modeling.heads import LM_HEAD


class LlavaParallel(ParallelModel):
    """Sharding plan of the LLaVA family, and base class for other models of a decoder and towers.

    Attributes:
        decoder_name: the attribute name of the decoder. Its configuration is ``text_config``.
        towers: the attribute name of each tower, with the name of its configuration.
        projectors: the modules between towers and decoder.
        classes: the class of each part that transformers does not export.
    """

    decoder_name: ClassVar[str] = "language_model"
    towers: ClassVar[dict[str, str]] = {"vision_tower": "vision_config"}
    projectors: ClassVar[Entries] = {"multi_modal_projector": Replicated()}
    classes: ClassVar[dict[str, type[ParallelModel]]] = {}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        parts = {cls.decoder_name: config.text_config, **{name: getattr(config, of) for name, of in cls.towers.items()}}
        decoder, *towers = [(name, cls.classes.get(name) or AutoModel.class_for(of), of) for name, of in parts.items()]
        return plan_with_towers(decoder, towers, cls.projectors)


class LlavaModel(LlavaParallel, hf.LlavaModel):
    pass


class LlavaForConditionalGeneration(LlavaParallel, hf.LlavaForConditionalGeneration):
    head_plan = LM_HEAD
