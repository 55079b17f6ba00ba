"""Hunyuan 4 VL, its text model: Hunyuan 4 with positions of time, height and width."""

from transformers import HYV4VLTextConfig
from transformers.models.hy_v4_vl import modeling_hy_v4_vl as hf

from oslo_models.models.hy_v4 import HYV4Parallel


class HYV4VLTextModel(HYV4Parallel, hf.HYV4VLTextModel):
    pass
