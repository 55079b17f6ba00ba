"""LayoutLMv3: RoBERTa that reads the page of each token and the patches of the page's image."""

from dataclasses import replace
from typing import Any

from transformers import LayoutLMv3Config
from transformers.models.layoutlmv3 import modeling_layoutlmv3 as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, Replicated
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.layoutlm import LayoutLMParallel
from oslo_models.sharding.layout import EvenSplit


class LayoutLMv3Parallel(LayoutLMParallel):
    """Sharding plan of the LayoutLMv3 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        local = {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
        biases = [f"encoder.rel_pos_{axis}bias" for axis in ("", "x_", "y_")]
        patches = {name: Replicated() for name in ("patch_embed", "cls_token", "pos_embed")}
        both = {**patches, "norm": Norm(), "LayerNorm": Norm()}
        embed = {**plan.embed, **both, **dict.fromkeys(biases, ColumnParallel(EvenSplit(heads.count)))}
        return replace(
            plan,
            embed=embed,
            blocks={"encoder.layer": {**plan.blocks["encoder.layer"], "attention.self": LocalAttributes(local)}},
            head={},
            optional=(*both, *biases),
        ).with_rules(single_stage_reason="the patches of its images follow the embedded tokens")


class LayoutLMv3Model(LayoutLMv3Parallel, hf.LayoutLMv3Model):
    pass


class LayoutLMv3ForSequenceClassification(LayoutLMv3Parallel, hf.LayoutLMv3ForSequenceClassification):
    head_plan = CLASSIFIER


class LayoutLMv3ForTokenClassification(LayoutLMv3Parallel, hf.LayoutLMv3ForTokenClassification):
    head_plan = CLASSIFIER


class LayoutLMv3ForQuestionAnswering(LayoutLMv3Parallel, hf.LayoutLMv3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
