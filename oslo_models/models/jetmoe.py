"""JetMoE: Llama with experts in place of MLPs and of query and output projections."""

from dataclasses import replace
from typing import Any

from transformers import JetMoeConfig
from transformers.models.jetmoe import modeling_jetmoe as hf
from transformers.models.jetmoe.modeling_jetmoe import JetMoePreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.expert_entries import StackedColumnParallel, StackedRowParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads
from oslo_models.sharding.plan import ColumnParallel, Entries, LocalModule, Plan, Replicated, RowParallel


class JetMoeParallel(LlamaParallel):
    """Sharding plan of the JetMoE family.

    Attention experts are always sharded over heads, regardless of ``expert_parallel_size``. A rank therefore computes
    attention for its heads only, and stores only their keys and values. Its share of the weights is the same.
    """

    mlp = {
        "mlp.router": Replicated(),
        "mlp.input_linear": StackedColumnParallel(parts=2),
        "mlp.output_linear": StackedRowParallel(),
        "mlp.bias": Replicated(),
    }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), attention_groups=config.num_experts_per_tok)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        own = EvenSplit(config.num_key_value_heads, config.kv_channels)  # each has one query head per chosen expert
        experts = "self_attention.experts"
        return {
            "self_attention.kv_proj": ColumnParallel(own, own),
            experts: LocalModule({"hidden_size": own.local_extent}),
            f"{experts}.router": Replicated(),
            f"{experts}.input_linear": ColumnParallel(own, dim=1),
            f"{experts}.output_linear": RowParallel(own),
            f"{experts}.bias": Replicated(),
        }


class JetMoeModel(JetMoeParallel, hf.JetMoeModel):
    pass


class JetMoeForCausalLM(JetMoeParallel, hf.JetMoeForCausalLM):
    head_plan = LM_HEAD


class JetMoeForSequenceClassification(JetMoeParallel, hf.JetMoeForSequenceClassification):
    head_plan = SCORE
