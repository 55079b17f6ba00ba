"""Falcon-H1: Bamba with attention and a Mamba-2 mixer beside each other in every block, and multipliers throughout."""

from dataclasses import replace
from typing import Any

from transformers import FalconH1Config
from transformers.models.falcon_h1 import modeling_falcon_h1 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bamba import BambaParallel
from oslo_models.sharding.plan import Entries, Plan


class FalconH1Parallel(BambaParallel):
    """Sharding plan of the Falcon-H1 family."""

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        entries = dict(super().mixer(config))
        entries["mamba"] = replace(entries["mamba"], scales="mup_vector")  # type: ignore[call-arg]
        if not config.mamba_rms_norm:
            del entries["mamba.norm"]
        return entries

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(disabled_after_first_stage={"embedding_multiplier": 1.0})


class FalconH1Model(FalconH1Parallel, hf.FalconH1Model):
    pass


class FalconH1ForCausalLM(FalconH1Parallel, hf.FalconH1ForCausalLM):
    head_plan = LM_HEAD
