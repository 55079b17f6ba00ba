"""CLIP: an image encoder and a text encoder. The patch embedding is replicated on every rank."""

from typing import Any, ClassVar

from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from transformers import initialization as init
from transformers.models.clip import modeling_clip as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.models.vit import patch_positions
from oslo_models.sharding.pipeline_rules import InputPositions

VISION, TEXT = "vision_model", "text_model"
VISUAL: Entries = {f"{VISION}.post_layernorm": Norm(), "visual_projection": Replicated()}


class CLIPParallel(ParallelModel):
    """Sharding plan of the CLIP family.

    Attributes:
        encoders: the encoders of the model, with the prefixes of their module names.
        image_embed: the modules between the pixels and the blocks.
        text_head: the modules after the blocks of the text encoder.
        extra_positions: number of image positions without a patch, such as the class token.
    """

    encoders: ClassVar[dict[str, str]] = {VISION: f"{VISION}.", TEXT: f"{TEXT}."}
    image_embed: ClassVar[Entries] = {"embeddings": Replicated(), "pre_layrnorm": Norm()}
    text_head: ClassVar[Entries] = {"final_layer_norm": Norm()}
    extra_positions: ClassVar[int] = 1
    loss_inputs = ("return_loss",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed: dict[str, Replicated] = {}
        head: dict[str, Replicated] = {}
        blocks, positions = {}, {}
        for encoder, path in cls.encoders.items():
            own = getattr(config, encoder.replace("model", "config"), config)
            heads = heads_of(own)
            stack = f"{path}encoder.layers"
            blocks[stack] = {
                "layer_norm1": Norm(),
                **qkv("self_attn", heads),
                "self_attn.out_proj": RowParallel(heads),
                "layer_norm2": Norm(),
                "mlp.fc1": ColumnParallel(),
                "mlp.fc2": RowParallel(),
            }
            if encoder == TEXT:
                tables = {"token_embedding": VocabParallel(), "position_embedding": Replicated()}
                embed |= {f"{path}embeddings.{name}": entry for name, entry in tables.items()}
                head |= {f"{path}{name}": entry for name, entry in cls.text_head.items()}
            else:
                embed |= {f"{path}{name}": entry for name, entry in cls.image_embed.items()}
                positions[stack] = cls.image_positions(own)
        return Plan(embed=embed, blocks=blocks, head=head).with_rules(input_positions=positions)

    @classmethod
    def image_positions(cls, config: Any) -> InputPositions:
        """Return the rule for the positions of images, by the configuration of the image encoder."""
        return patch_positions(config.patch_size, cls.extra_positions)


class CLIPModel(CLIPParallel, hf.CLIPModel):
    head_plan = {
        "vision_model.post_layernorm": Norm(),
        "visual_projection": Replicated(),
        "text_projection": Replicated(),
        "logit_scale": Replicated(),
    }
    loss_is_mean = False

    def _initialize_constructed(self) -> None:
        init.constant_(self.logit_scale, self.config.logit_scale_init_value)


class CLIPTextModel(CLIPParallel, hf.CLIPTextModel):
    encoders = {"text_model": ""}


class CLIPTextModelWithProjection(CLIPParallel, hf.CLIPTextModelWithProjection):
    head_plan = {"text_projection": Replicated()}
    encoders = {"text_model": ""}


class CLIPVisionModel(CLIPParallel, hf.CLIPVisionModel):
    head_plan = {"post_layernorm": Norm()}
    encoders = {"vision_model": ""}


class CLIPVisionModelWithProjection(CLIPParallel, hf.CLIPVisionModelWithProjection):
    head_plan = VISUAL
    encoders = {"vision_model": ""}


class CLIPForImageClassification(CLIPParallel, hf.CLIPForImageClassification):
    head_plan = {"vision_model.post_layernorm": Norm(), "classifier": Replicated()}
    encoders = {"vision_model": "vision_model."}
