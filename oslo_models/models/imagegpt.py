"""ImageGPT: GPT-2 on colours of pixels, with norms that do not subtract the mean, and an LM head that is not tied."""

from typing import Any

from transformers import ImageGPTConfig
from transformers import initialization as init
from transformers.models.imagegpt import modeling_imagegpt as hf
from transformers.pytorch_utils import Conv1D

from oslo_models.layers.entries import Plan
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.gpt2 import GPT2Parallel


class ImageGPTParallel(GPT2Parallel):
    """Sharding plan of the ImageGPT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        numbered = "with scale_attn_by_inverse_layer_idx=True, each stage would number its blocks anew"
        reason = numbered if config.scale_attn_by_inverse_layer_idx else ""
        return super().plan(config).with_rules(single_stage_reason=reason)

    def _initialize_constructed(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, Conv1D):
                init.zeros_(module.bias)
                if not name.endswith("c_proj"):
                    init.normal_(module.weight, std=0.02)


class ImageGPTModel(ImageGPTParallel, hf.ImageGPTModel):
    pass


class ImageGPTForCausalImageModeling(ImageGPTParallel, hf.ImageGPTForCausalImageModeling):
    head_plan = LM_HEAD


class ImageGPTForImageClassification(ImageGPTParallel, hf.ImageGPTForImageClassification):
    head_plan = SCORE
