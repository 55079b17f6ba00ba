"""BLIP-2: an encoder of image patches, a Q-Former that pools them, and a language model."""

from typing import Any, ClassVar

from transformers import Blip2Config, Blip2VisionConfig
from transformers.models.blip_2 import modeling_blip_2 as hf

from oslo_models.auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, heads_of, qkv
from oslo_models.modeling.composite import plan_of_generator
from oslo_models.models.blip import BlipVisionParallel


class QFormerParallel(ParallelModel):
    """Sharding plan of Q-Formers: learned queries attend to each other, to texts and to images.

    Attributes:
        embedding: the modules before the blocks.
    """

    embedding: ClassVar[Entries] = {"embeddings": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block: dict[str, Replicated] = {}
        for attention in ("attention", "crossattention"):
            block |= qkv(f"{attention}.attention", heads, QUERY_KEY_VALUE)
            block |= {f"{attention}.output.dense": RowParallel(heads), f"{attention}.output.LayerNorm": Norm()}
        for suffix in ("", "_query"):
            block |= {f"intermediate{suffix}.dense": ColumnParallel(), f"output{suffix}.dense": RowParallel()}
            block |= {f"output{suffix}.LayerNorm": Norm()}
        own = tuple(name for name in block if name.startswith(("crossattention", "intermediate.", "output.")))
        return Plan(embed=cls.embedding, blocks={"encoder.layer": block}, head={}, optional=own).with_rules(
            single_stage_reason="it reads queries in place of tokens"
        )


class WithQFormerParallel(ParallelModel):
    """Sharding plan of models of an encoder of images, a Q-Former and a language model.

    Attributes:
        queries: the class of the Q-Former.
    """

    queries: ClassVar[type[QFormerParallel]] = QFormerParallel
    head_plan = {"query_tokens": Replicated(), "language_projection": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        auto = AutoModelForCausalLM if config.use_decoder_only_language_model else AutoModelForSeq2SeqLM
        vision = BlipVisionParallel.plan(config.vision_config).under("vision_model.")
        between = cls.queries.plan(config.qformer_config).under("qformer.")
        text = plan_of_generator("language_model", auto.class_for(config.text_config), config.text_config)
        return vision | between | text


class Blip2VisionModel(BlipVisionParallel, hf.Blip2VisionModel):
    pass


class Blip2QFormerParallel(QFormerParallel):
    """Sharding plan of the Q-Former."""

    embedding = {"layernorm": Norm()}


class Blip2ForConditionalGeneration(WithQFormerParallel, hf.Blip2ForConditionalGeneration):
    queries = Blip2QFormerParallel
