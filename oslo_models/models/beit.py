"""BEiT: ViT with scaled residuals, and biases of relative positions in each block or shared by all."""

from typing import Any

from transformers import BeitConfig
from transformers.models.beit import modeling_beit as hf

from oslo_models.layers.entries import ColumnParallel, Plan, Replicated
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.vit import ViTParallel
from oslo_models.sharding.layout import EvenSplit

TABLE = "relative_position_bias_table"
SHARED_BIASES = "all blocks share the biases of relative positions"


class BeitParallel(ViTParallel):
    """Sharding plan of the BEiT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        by_head = ColumnParallel(EvenSplit(config.num_attention_heads), dim=1)
        (block,) = plan.blocks.values()
        more = {"lambda_1": Replicated(), "lambda_2": Replicated(), f"relative_position_bias.{TABLE}": by_head}
        shared = f"shared_position_bias.{TABLE}"
        return Plan(
            embed={**plan.embed, shared: by_head},
            blocks={"layers": {**block, **more}},
            head=plan.head,
            optional=(*more, *plan.head, shared),
        ).with_rules(
            input_positions=plan.pipeline.input_positions,
            single_stage_reason=SHARED_BIASES if config.use_shared_relative_position_bias else "",
        )


class BeitModel(BeitParallel, hf.BeitModel):
    pass


class BeitForImageClassification(BeitParallel, hf.BeitForImageClassification):
    head_plan = CLASSIFIER
