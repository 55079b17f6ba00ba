"""Mamba: blocks of one selective state-space mixer each, over channels."""

from __future__ import annotations

from typing import Any

from transformers import MambaConfig
from transformers.models.mamba import modeling_mamba as hf
from transformers.models.mamba.modeling_mamba import MambaPreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import selective_scan
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.sharding.plan import Entries, Norm, Plan, VocabParallel


class MambaParallel(ParallelModel):
    """Sharding plan of the Mamba family."""

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        """The entries of a mixer."""
        return selective_scan("mixer")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed={"embeddings": VocabParallel()},
            blocks={"layers": {"norm": Norm(), **cls.mixer(config)}},
            head={"norm_f": Norm()},
            optional=("conv1d.bias",),
        )

    def initialize_weights(self) -> None:
        """As transformers', which with ``rescale_prenorm_residual`` would scale what it has loaded once more."""
        weights = (param for name, param in self.named_parameters() if name.endswith("out_proj.weight"))
        loaded = [(param, param.detach().clone()) for param in weights if getattr(param, "_is_hf_initialized", False)]
        super().initialize_weights()
        for param, value in loaded:
            param.data.copy_(value)


class MambaModel(MambaParallel, hf.MambaModel):
    pass


class MambaForCausalLM(MambaParallel, hf.MambaForCausalLM):
    head_plan = LM_HEAD
