"""Doge: Llama with attention masks made of the values, scaled residuals and, in some sizes, experts of two vectors.

The masks of all heads are summed over the values of all ranks; each rank keeps the masks of its heads. Routers are
replicated, as in other mixtures of experts. They mix the tokens of a batch, so its rows depend on each other. In the
first block, equal tokens tie for the last place in a mask. The number of keys, with padding, decides which token stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import DogeConfig
from transformers.models.doge import modeling_doge as hf
from transformers.models.doge.modeling_doge import DogePreTrainedModel

from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import ColumnParallel, Entries, InnerRowParallel, Plan, Replicated, VectorExperts


class DogeParallel(LlamaParallel):
    """Sharding plan of the Doge family."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")
    optional = ("mlp.router_gate", "mlp.down_embed", "mlp.up_embed")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        each = replace(heads, head_dim=1).key_value
        return {
            **super().attention(config, heads),
            "self_attn.A": ColumnParallel(each),
            "self_attn.dt_proj": InnerRowParallel(heads.key_value, outputs=each),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        block = {**plan.blocks["layers"], "input_residual": Replicated(), "post_attention_residual": Replicated()}
        if not config.is_moe:
            return replace(plan, blocks={"layers": block})
        experts: Entries = {
            "mlp": VectorExperts(),
            **gated_mlp("mlp"),
            "mlp.router_gate": Replicated(),
            "mlp.down_embed": ColumnParallel(transposed=True),
            "mlp.up_embed": ColumnParallel(transposed=True),
        }
        return replace(
            plan,
            blocks={"layers": {**block, **experts}},
            single_stage_reason="routers mix the rows of a batch, so that micro-batches choose other experts",
        )


class DogeModel(DogeParallel, hf.DogeModel):
    pass


class DogeForCausalLM(DogeParallel, hf.DogeForCausalLM):
    head_plan = LM_HEAD


class DogeForSequenceClassification(DogeParallel, hf.DogeForSequenceClassification):
    head_plan = SCORE
