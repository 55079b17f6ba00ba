"""RT-DETR v2: RT-DETR with other scales of its samples. Convolutions are replicated. Its loss needs scipy."""

from collections.abc import Mapping
from typing import Any

from transformers import RTDetrV2Config
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as hf

from oslo_models.layers.entries import Replicated
from oslo_models.models.rt_detr import RTDetrParallel


class RTDetrV2Parallel(RTDetrParallel):
    """Sharding plan of the RT-DETR v2 family."""

    @classmethod
    def attention_dims(cls, config: Any) -> Mapping[str, int]:
        return {"cross_attentions": 2}  # [rows, queries, heads, samples]


class RTDetrV2Model(RTDetrV2Parallel, hf.RTDetrV2Model):
    pass


class RTDetrV2ForObjectDetection(RTDetrV2Parallel, hf.RTDetrV2ForObjectDetection):
    head_plan = {"class_embed": Replicated(), "bbox_embed": Replicated()}
