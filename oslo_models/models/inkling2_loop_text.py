"""Inkling 2 Loop, its text model: Inkling 2 with middle blocks that run several times and read the pass before.

Every rank computes the messages and their gates in full, because they read whole hidden states.
"""

from dataclasses import replace
from typing import Any

from transformers import Inkling2LoopTextConfig
from transformers.models.inkling2_loop import modeling_inkling2_loop as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.inkling2_text import Inkling2Parallel

_GATES = tuple(f"{name}_message_gate" for name in ("q", "k", "v", "mlp"))


class Inkling2LoopParallel(Inkling2Parallel):
    """Sharding plan of the text models of the Inkling 2 Loop family."""

    replicated = (*Inkling2Parallel.replicated, *_GATES)
    optional = (*Inkling2Parallel.optional, *_GATES)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(plan, embed={**plan.embed, "message_input": Replicated()})


class Inkling2LoopTextModel(Inkling2LoopParallel, hf.Inkling2LoopTextModel):
    pass


class Inkling2LoopForCausalLM(Inkling2LoopParallel, hf.Inkling2LoopForCausalLM):
    head_plan = LM_HEAD
