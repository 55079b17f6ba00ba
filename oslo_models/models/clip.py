"""CLIP: an image encoder and a text encoder. The patch embedding is replicated on every rank."""

from typing import Any, ClassVar

from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig
from transformers import initialization as init
from transformers.models.clip import modeling_clip as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv

VISION, TEXT = "vision_model", "text_model"
VISUAL: Entries = {f"{VISION}.post_layernorm": Norm(), "visual_projection": Replicated()}


class CLIPParallel(ParallelModel):
    """Sharding plan of the CLIP family.

    Attributes:
        encoders: the encoders of the model, with the prefixes of their module names.
    """

    encoders: ClassVar[dict[str, str]] = {VISION: f"{VISION}.", TEXT: f"{TEXT}."}
    loss_inputs = ("return_loss",)

    def _initialize_constructed(self) -> None:
        if "logit_scale" in type(self).head_plan:
            init.constant_(self.logit_scale, self.config.logit_scale_init_value)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed: dict[str, Replicated] = {}
        blocks, head, positions = {}, {}, {}
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
                head[f"{path}final_layer_norm"] = Norm()
            else:
                embed |= {f"{path}embeddings": Replicated(), f"{path}pre_layrnorm": Norm()}
                positions[stack] = lambda batch, side=own.patch_size: _patches(batch["pixel_values"].shape, side)
        return Plan(embed=embed, blocks=blocks, head=head).with_rules(input_positions=positions)


def _patches(shape: Any, side: int) -> tuple[int, int]:
    """Return the number of rows and positions of images: their patches, and one more."""
    rows, _, height, width = shape
    return rows, 1 + (height // side) * (width // side)


class CLIPModel(CLIPParallel, hf.CLIPModel):
    head_plan = {
        "vision_model.post_layernorm": Norm(),
        "visual_projection": Replicated(),
        "text_projection": Replicated(),
        "logit_scale": Replicated(),
    }
    loss_is_mean = False


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
