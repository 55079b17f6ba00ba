"""PP-FormulaNet: SAM's encoder of windows of patches, with a projector inside, and the decoder of mBART."""

from collections.abc import Mapping
from typing import Any

from transformers import PPFormulaNetConfig
from transformers.models.pp_formulanet import modeling_pp_formulanet as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.got_ocr2 import WindowsParallel
from oslo_models.models.mbart import MBartParallel


class PPFormulaNetParallel(MBartParallel):
    """Sharding plan of the PP-FormulaNet family."""

    stacks = ("decoder",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        projector = Plan(embed={}, blocks={}, head={"multi_modal_projector": Replicated()})
        encoder = (WindowsParallel.plan(config.vision_config) | projector).under("encoder.")
        return encoder | super().plan(config.text_config)

    @classmethod
    def joined_attentions(cls, config: Any) -> Mapping[str, int]:
        return {"encoder_attentions": config.vision_config.num_attention_heads}


class PPFormulaNetModel(PPFormulaNetParallel, hf.PPFormulaNetModel):
    pass


class PPFormulaNetForConditionalGeneration(PPFormulaNetParallel, hf.PPFormulaNetForConditionalGeneration):
    head_plan = LM_HEAD
