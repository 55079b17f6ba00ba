"""NLLB-MoE: M2M100 with experts in some blocks; a router chooses two experts for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import NllbMoeConfig
from transformers.models.nllb_moe import modeling_nllb_moe as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated, RowParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.m2m_100 import M2M100Parallel
from oslo_models.models.switch_transformers import SeparateExperts
from oslo_models.sharding.layout import EvenSplit, ExpertWidth

NAMES = {"fc1": "ffn.fc1", "fc2": "ffn.fc2", "final_layer_norm": "ff_layer_norm"}
"""Module names in BART's blocks, with their names here."""


class NllbMoeParallel(M2M100Parallel):
    """Sharding plan of the NLLB-MoE family.

    The capacity of an expert is for all tokens of a batch. If it is too small, micro-batches drop other tokens than a
    full batch. Experts behave as in transformers: in version 5.23, the first two experts compute all tokens, because
    `NllbMoeExperts` reads a mask of experts as indices. The other experts get no gradients.
    """

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        block = super().block(heads, *attentions)
        return {NAMES.get(name, name.replace("encoder_attn", "cross_attention")): block[name] for name in block}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        widths = {"encoder": config.encoder_ffn_dim, "decoder": config.decoder_ffn_dim}
        blocks = {
            stack: {**block, **cls.mixture(config, next(widths[part] for part in widths if part in stack))}
            for stack, block in plan.blocks.items()
        }
        either = ("ffn.router", "ffn.experts", ".fc1", ".fc2")  # a block has one MLP, or experts
        return replace(plan, blocks=blocks, optional=(*plan.optional, *either))

    @classmethod
    def mixture(cls, config: Any, width: int) -> Entries:
        """Return the plan entries of the router and the experts of a block, with MLPs of this width."""
        mixture: dict[str, Replicated] = {"ffn.router": Replicated(), "ffn.experts": SeparateExperts()}
        for number in range(config.num_experts):
            split = ExpertWidth(width, expert=number, experts=config.num_experts)
            expert = f"ffn.experts.expert_{number}"
            mixture |= {f"{expert}.fc1": ColumnParallel(split), f"{expert}.fc2": RowParallel(split)}
        return mixture


class NllbMoeModel(NllbMoeParallel, hf.NllbMoeModel):
    pass


class NllbMoeForConditionalGeneration(NllbMoeParallel, hf.NllbMoeForConditionalGeneration):
    head_plan = LM_HEAD
