"""NLLB-MoE: M2M100 with experts in some blocks, two of which a router chooses for each token."""

from dataclasses import replace
from typing import Any

from transformers import NllbMoeConfig
from transformers.models.nllb_moe import modeling_nllb_moe as hf
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoePreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.m2m_100 import M2M100Parallel
from oslo_models.sharding.layout import EvenSplit
from oslo_models.sharding.plan import ColumnParallel, Plan, Replicated, RowParallel

NAMES = {"fc1": "ffn.fc1", "fc2": "ffn.fc2", "final_layer_norm": "ff_layer_norm"}
"""The names of what BART's blocks have too."""


class NllbMoeParallel(M2M100Parallel):
    """Sharding plan of the NLLB-MoE family.

    The capacity of an expert is for all tokens of a batch: where it is too small, micro-batches lose other tokens.
    Experts compute what transformers lets them compute: in its version 5.23 the first two of them compute everything
    (`NllbMoeExperts` takes a mask of experts for their numbers), and the others have no gradients.
    """

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        block = super().block(heads, *attentions)
        return {NAMES.get(name, name.replace("encoder_attn", "cross_attention")): block[name] for name in block}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, experts = super().plan(config), [f"ffn.experts.expert_{number}" for number in range(config.num_experts)]
        mixture = {
            "ffn.router": Replicated(),
            **{f"{expert}.fc1": ColumnParallel() for expert in experts},
            **{f"{expert}.fc2": RowParallel() for expert in experts},
        }
        blocks = {stack: {**block, **mixture} for stack, block in plan.blocks.items()}
        either = ("ffn.router", ".fc1", ".fc2")  # a block has one MLP, or experts
        return replace(plan, blocks=blocks, optional=(*plan.optional, *either))


class NllbMoeModel(NllbMoeParallel, hf.NllbMoeModel):
    pass


class NllbMoeForConditionalGeneration(NllbMoeParallel, hf.NllbMoeForConditionalGeneration):
    head_plan = LM_HEAD
