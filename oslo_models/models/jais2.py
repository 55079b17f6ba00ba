"""Jais 2: Nemotron with layer norms."""

from transformers import Jais2Config
from transformers.models.jais2 import modeling_jais2 as hf
from transformers.models.jais2.modeling_jais2 import Jais2PreTrainedModel

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.nemotron import NemotronParallel


class Jais2Parallel(NemotronParallel):
    """Sharding plan of the Jais 2 family."""


class Jais2Model(Jais2Parallel, hf.Jais2Model):
    pass


class Jais2ForCausalLM(Jais2Parallel, hf.Jais2ForCausalLM):
    head_plan = LM_HEAD
