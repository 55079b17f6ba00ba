"""Falcon Mamba: Mamba with norms, without weights, of time steps, B and C."""

from transformers import FalconMambaConfig
from transformers.models.falcon_mamba import modeling_falcon_mamba as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.mamba import MambaParallel


class FalconMambaModel(MambaParallel, hf.FalconMambaModel):
    pass


class FalconMambaForCausalLM(MambaParallel, hf.FalconMambaForCausalLM):
    head_plan = LM_HEAD
