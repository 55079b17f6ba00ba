"""DeiT: ViT with a distillation token."""

from transformers import DeiTConfig
from transformers.models.deit import modeling_deit as hf

from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.vit import ViTParallel
from oslo_models.sharding.plan import Replicated


class DeiTParallel(ViTParallel):
    """Sharding plan of the DeiT family."""

    extra_positions = 2


class DeiTModel(DeiTParallel, hf.DeiTModel):
    pass


class DeiTForImageClassification(DeiTParallel, hf.DeiTForImageClassification):
    head_plan = CLASSIFIER


class DeiTForMaskedImageModeling(DeiTParallel, hf.DeiTForMaskedImageModeling):
    head_plan = {"decoder": Replicated()}
    loss_inputs = ("bool_masked_pos",)
    loss_is_mean = False


class DeiTForImageClassificationWithTeacher(DeiTParallel, hf.DeiTForImageClassificationWithTeacher):
    head_plan = {"cls_classifier": Replicated(), "distillation_classifier": Replicated()}
