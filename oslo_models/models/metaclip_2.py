"""MetaCLIP 2: CLIP trained on texts of many languages."""

from transformers import MetaClip2Config, MetaClip2TextConfig, MetaClip2VisionConfig
from transformers import initialization as init
from transformers.models.metaclip_2 import modeling_metaclip_2 as hf

from oslo_models.layers.entries import Norm, Replicated
from oslo_models.models.clip import TEXT, VISION, VISUAL, CLIPParallel


class MetaClip2Model(CLIPParallel, hf.MetaClip2Model):
    head_plan = {**VISUAL, "text_projection": Replicated(), "logit_scale": Replicated()}
    loss_is_mean = False

    def _initialize_constructed(self) -> None:
        init.constant_(self.logit_scale, self.config.logit_scale_init_value)


class MetaClip2TextModel(CLIPParallel, hf.MetaClip2TextModel):
    encoders = {TEXT: ""}


class MetaClip2TextModelWithProjection(CLIPParallel, hf.MetaClip2TextModelWithProjection):
    head_plan = {"text_projection": Replicated()}
    encoders = {TEXT: ""}


class MetaClip2VisionModel(CLIPParallel, hf.MetaClip2VisionModel):
    head_plan = {"post_layernorm": Norm()}
    encoders = {VISION: ""}


class MetaClip2VisionModelWithProjection(CLIPParallel, hf.MetaClip2VisionModelWithProjection):
    head_plan = VISUAL
    encoders = {VISION: ""}


class MetaClip2ForImageClassification(CLIPParallel, hf.MetaClip2ForImageClassification):
    head_plan = {f"{VISION}.post_layernorm": Norm(), "classifier": Replicated()}
    encoders = {VISION: f"{VISION}."}
