"""DBRX: vertically stacked expert matrices, and grouped heads in one clipped projection."""

from typing import Any

from transformers import DbrxConfig
from transformers.models.dbrx import modeling_dbrx as hf
from transformers.models.dbrx.modeling_dbrx import DbrxPreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.expert_entries import RoutedExperts
from oslo_models.sharding.layout import EvenSplit, ExpertWidth
from oslo_models.sharding.plan import (
    ColumnParallel,
    LocalModule,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    VocabParallel,
)


class DbrxParallel(ParallelModel):
    """Sharding plan of the DBRX family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, count = LlamaParallel.heads(config), config.ffn_config.moe_num_experts
        width = config.ffn_config.ffn_hidden_size
        local = {**LlamaParallel.local_attributes(heads), "hidden_size": heads.query.local_extent}
        matrices = ColumnParallel(*(ExpertWidth(width, expert=number, experts=count) for number in range(count)))
        block = {
            "norm_attn_norm.norm_1": Norm(),
            "norm_attn_norm.attn": LocalModule(local),
            "norm_attn_norm.attn.Wqkv": ColumnParallel(heads.query, heads.key_value, heads.key_value),
            "norm_attn_norm.attn.out_proj": RowParallel(heads.query),
            "norm_attn_norm.norm_2": Norm(),
            "ffn.router.layer": Replicated(),
            "ffn.experts": RoutedExperts({"ffn_hidden_size": EvenSplit(width).local_extent}),
            **{f"ffn.experts.mlp.{name}": matrices for name in ("w1", "v1", "w2")},
        }
        return Plan(
            embed={"wte": VocabParallel()},
            blocks={"blocks": block},
            head={"norm_f": Norm()},
        )


class DbrxModel(DbrxParallel, hf.DbrxModel):
    pass


class DbrxForCausalLM(DbrxParallel, hf.DbrxForCausalLM):
    head_plan = LM_HEAD
