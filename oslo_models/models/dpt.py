"""DPT: ViT with replicated convolutions that join the outputs of several blocks, for depths or segments."""

from typing import Any

from transformers import DPTConfig
from transformers.models.dpt import modeling_dpt as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, nested_attention_block

SEVERAL_BLOCKS = "convolutions read the outputs of several blocks"


class DPTParallel(ParallelModel):
    """Sharding plan of the DPT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        if config.backbone_config is not None and not config.is_hybrid:
            kind = config.backbone_config.model_type
            raise ValueError(f"backbone_config of type {kind!r}: DPT is sharded with its own encoder only; use `plan=`")
        return Plan(
            embed={"embeddings": Replicated()},
            blocks={"encoder.layer": nested_attention_block(heads_of(config))},
            head={"layernorm": Norm(), "pooler": Replicated()},
            optional=("pooler", "auxiliary_head"),
        ).with_rules(single_stage_reason=SEVERAL_BLOCKS)


class DPTModel(DPTParallel, hf.DPTModel):
    pass


class DPTForDepthEstimation(DPTParallel, hf.DPTForDepthEstimation):
    head_plan = {"neck": Replicated(), "head": Replicated()}


class DPTForSemanticSegmentation(DPTParallel, hf.DPTForSemanticSegmentation):
    head_plan = {"neck": Replicated(), "head": Replicated(), "auxiliary_head": Replicated()}
