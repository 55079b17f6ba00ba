"""Mamba: blocks of one selective state-space mixer each, over channels."""

from __future__ import annotations

from typing import Any

from transformers import MambaConfig
from transformers.models.mamba import modeling_mamba as hf

from oslo_models.layers.entries import Entries, Norm, Plan, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import selective_scan
from oslo_models.modeling.heads import LM_HEAD


class MambaParallel(ParallelModel):
    """Sharding plan of the Mamba family."""

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        """Return the plan entries of a mixer."""
        return selective_scan("mixer")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed={"embeddings": VocabParallel()},
            blocks={"layers": {"norm": Norm(), **cls.mixer(config)}},
            head={"norm_f": Norm()},
            optional=("conv1d.bias",),
        )


class MambaModel(MambaParallel, hf.MambaModel):
    pass


class MambaForCausalLM(MambaParallel, hf.MambaForCausalLM):
    head_plan = LM_HEAD
