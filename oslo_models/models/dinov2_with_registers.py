"""DINOv2 with registers: DINOv2 with further tokens beside the class token."""

from transformers import Dinov2WithRegistersConfig
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as hf

from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.dinov2 import Dinov2Parallel


class Dinov2WithRegistersModel(Dinov2Parallel, hf.Dinov2WithRegistersModel):
    pass


class Dinov2WithRegistersForImageClassification(Dinov2Parallel, hf.Dinov2WithRegistersForImageClassification):
    head_plan = CLASSIFIER
