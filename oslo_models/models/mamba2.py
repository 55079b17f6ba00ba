"""Mamba-2: Mamba with groups of heads that share B and C, and gated norms."""

from typing import Any

from transformers import Mamba2Config
from transformers.models.mamba2 import modeling_mamba2 as hf

from oslo_models.modeling.blocks import state_space
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.mamba import MambaParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries


class Mamba2Parallel(MambaParallel):
    """Sharding plan of the Mamba-2 family."""

    @classmethod
    def mixer(cls, config: Any) -> Entries:
        return state_space("mixer", GroupedHeads(config.num_heads, config.n_groups, config.head_dim), config.state_size)


class Mamba2Model(Mamba2Parallel, hf.Mamba2Model):
    pass


class Mamba2ForCausalLM(Mamba2Parallel, hf.Mamba2ForCausalLM):
    head_plan = LM_HEAD
