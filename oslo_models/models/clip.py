"""CLIP: an encoder of images and one of texts. The convolution that embeds patches is whole on every rank."""

from typing import Any, ClassVar

from transformers import initialization as init
from transformers.models.clip import modeling_clip as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row, Vocab

VISION, TEXT = "vision_model", "text_model"
VISUAL: Entries = {f"{VISION}.post_layernorm": Norm(), "visual_projection": Replicated()}
HEADS: dict[str, Entries] = {
    "Model": {**VISUAL, "text_projection": Replicated(), "logit_scale": Replicated()},
    "TextModel": {},
    "TextModelWithProjection": {"text_projection": Replicated()},
    "VisionModel": {"post_layernorm": Norm()},
    "VisionModelWithProjection": VISUAL,
    "ForImageClassification": {f"{VISION}.post_layernorm": Norm(), "classifier": Replicated()},
}
TOWERS: dict[str, dict[str, Any]] = {
    "TextModel": {"towers": {TEXT: ""}},
    "TextModelWithProjection": {"towers": {TEXT: ""}},
    "VisionModel": {"towers": {VISION: ""}},
    "VisionModelWithProjection": {"towers": {VISION: ""}},
    "ForImageClassification": {"towers": {VISION: f"{VISION}."}},
}


class CLIPParallel(ParallelModel):
    """How every model of the CLIP family divides.

    Attributes:
        towers: the encoders of the model, and how the names of their modules begin.
    """

    towers: ClassVar[dict[str, str]] = {VISION: f"{VISION}.", TEXT: f"{TEXT}."}
    loss_inputs = ("return_loss",)

    def initialize_constructed(self) -> None:
        if "logit_scale" in type(self).head:
            init.constant_(self.logit_scale, self.config.logit_scale_init_value)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        embed: dict[str, Replicated] = {}
        blocks, head, positions = {}, {}, {}
        for tower, path in cls.towers.items():
            own = getattr(config, tower.replace("model", "config"), config)
            heads = Units(own.num_attention_heads, own.hidden_size // own.num_attention_heads)
            stack = f"{path}encoder.layers"
            blocks[stack] = {
                "layer_norm1": Norm(),
                **{f"self_attn.{name}_proj": Column(heads) for name in "qkv"},
                "self_attn.out_proj": Row(heads),
                "layer_norm2": Norm(),
                "mlp.fc1": Column(),
                "mlp.fc2": Row(),
            }
            if tower == TEXT:
                tables = {"token_embedding": Vocab(), "position_embedding": Replicated()}
                embed |= {f"{path}embeddings.{name}": entry for name, entry in tables.items()}
                head[f"{path}final_layer_norm"] = Norm()
            else:
                embed |= {f"{path}embeddings": Replicated(), f"{path}pre_layrnorm": Norm()}
                positions[stack] = lambda batch, side=own.patch_size: _patches(batch["pixel_values"].shape, side)
        return Plan(embed=embed, blocks=blocks, head=head, positions=positions)


def _patches(shape: Any, side: int) -> tuple[int, int]:
    """Rows and positions of images: their patches, and one more."""
    rows, _, height, width = shape
    return rows, 1 + (height // side) * (width // side)


globals().update(family(CLIPParallel, hf, HEADS, Model={"has_loss_of_rows": False}, **TOWERS))
