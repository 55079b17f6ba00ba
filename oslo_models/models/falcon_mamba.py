"""Falcon Mamba: Mamba with norms, without weights, of time steps, B and C."""

from transformers import FalconMambaConfig
from transformers.models.falcon_mamba import modeling_falcon_mamba as hf
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.mamba import MambaParallel


class FalconMambaParallel(MambaParallel):
    """Sharding plan of the Falcon Mamba family."""


class FalconMambaModel(FalconMambaParallel, hf.FalconMambaModel):
    pass


class FalconMambaForCausalLM(FalconMambaParallel, hf.FalconMambaForCausalLM):
    head_plan = LM_HEAD
