"""Hiera: attention in windows that become fewer and wider. Stages with few heads have replicated attention."""

from typing import Any

from transformers import HieraConfig
from transformers.models.hiera import modeling_hiera as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.sharding.layout import EvenSplit


class HieraParallel(ParallelModel):
    """Sharding plan of the Hiera family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        blocks = {}
        for stage, count in enumerate(config.num_heads):
            heads = EvenSplit(count, int(config.embed_dim * config.embed_dim_multiplier**stage) // count)
            attention: Entries = {
                "attn": LocalAttributes({"num_heads": heads.local_count, "hidden_size_output": heads.local_extent}),
                "attn.qkv": ColumnParallel(heads, heads, heads),
                "attn.proj": RowParallel(heads),
            }
            if 2 * count < max(config.num_heads):  # the first stages have few heads and few parameters
                attention = {"attn": Replicated()}
            blocks[f"encoder.stages.{stage}.layers"] = {
                "layernorm_before": Norm(),
                **attention,
                "layernorm_after": Norm(),
                "mlp.fc1": ColumnParallel(),
                "mlp.fc2": RowParallel(),
                "proj": Replicated(),  # of the first block of a stage with another width
            }
        return Plan(
            embed={"embeddings": Replicated()},
            blocks=blocks,
            head={"pooler.layernorm": Norm()},
            optional=("proj", "pooler.layernorm"),
        ).with_rules(single_stage_reason="patches are merged between its blocks")


class HieraModel(HieraParallel, hf.HieraModel):
    pass


class HieraForImageClassification(HieraParallel, hf.HieraForImageClassification):
    head_plan = CLASSIFIER
