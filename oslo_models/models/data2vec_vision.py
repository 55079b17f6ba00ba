"""Data2Vec for images: BEiT with another training objective."""

from typing import Any

from transformers import Data2VecVisionConfig
from transformers.models.data2vec import modeling_data2vec_vision as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, nested_attention_block
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.beit import TABLE
from oslo_models.sharding.layout import EvenSplit


class Data2VecVisionParallel(ParallelModel):
    """Sharding plan of the Data2Vec family for images."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        by_head = ColumnParallel(EvenSplit(config.num_attention_heads), dim=1)
        own, shared = f"attention.attention.relative_position_bias.{TABLE}", f"encoder.relative_position_bias.{TABLE}"
        more = {"lambda_1": Replicated(), "lambda_2": Replicated(), own: by_head}
        head = {"layernorm": Norm(), "pooler.layernorm": Norm()}
        return Plan(
            embed={"embeddings": Replicated(), shared: by_head},
            blocks={"encoder.layer": {**nested_attention_block(heads_of(config)), **more}},
            head=head,
            optional=(*more, *head, shared, "auxiliary_head"),
        ).with_rules(single_stage_reason="its embedding returns the number of patches beside them")


class Data2VecVisionModel(Data2VecVisionParallel, hf.Data2VecVisionModel):
    pass


class Data2VecVisionForImageClassification(Data2VecVisionParallel, hf.Data2VecVisionForImageClassification):
    head_plan = CLASSIFIER


class Data2VecVisionForSemanticSegmentation(Data2VecVisionParallel, hf.Data2VecVisionForSemanticSegmentation):
    head_plan = dict.fromkeys(("fpn1", "fpn2", "decode_head", "auxiliary_head"), Replicated())
