"""MVP: BART, optionally with prompts in each block."""

from dataclasses import replace
from typing import Any

from transformers import MvpConfig
from transformers.models.mvp import modeling_mvp as hf

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated, SharedOutput
from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD, QA_OUTPUTS
from oslo_models.models.bart import BartParallel
from oslo_models.sharding.layout import EvenSplit


class MvpParallel(BartParallel):
    """Sharding plan of the MVP family."""

    embedding_changes = {**BartParallel.embedding_changes, "embed_scale": 1.0}

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        attributes = {"num_heads": heads.local_count, "embed_dim": heads.local_extent}
        local = LocalAttributes(attributes, per_head={"attn_prompt": replace(heads, width=1)})
        return super().block(heads, *attentions) | dict.fromkeys(attentions, local)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        if not config.use_prompt or "encoder" not in cls.stacks:  # MvpForCausalLM makes no prompts
            return plan
        prompts = {f"{stack}.self_attn_prompt": f"{stack}.layers" for stack in cls.stacks}
        prompts["decoder.cross_attn_prompt"] = "decoder.layers"
        return replace(
            plan,
            optional=(*plan.optional, "encoder.self_attn_prompt"),  # some releases give the encoder none
        ).with_rules(on_every_stage=dict.fromkeys(prompts, SharedOutput()), outputs_per_block=prompts)


class MvpModel(MvpParallel, hf.MvpModel):
    pass


class MvpForConditionalGeneration(MvpParallel, hf.MvpForConditionalGeneration):
    head_plan = LM_HEAD


class MvpForCausalLM(MvpParallel, hf.MvpForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)


class MvpForSequenceClassification(MvpParallel, hf.MvpForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class MvpForQuestionAnswering(MvpParallel, hf.MvpForQuestionAnswering):
    head_plan = QA_OUTPUTS
