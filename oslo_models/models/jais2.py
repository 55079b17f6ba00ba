"""Jais 2: Nemotron with layer norms."""

from transformers import Jais2Config
from transformers.models.jais2 import modeling_jais2 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.nemotron import NemotronParallel


class Jais2Model(NemotronParallel, hf.Jais2Model):
    pass


class Jais2ForCausalLM(NemotronParallel, hf.Jais2ForCausalLM):
    head_plan = LM_HEAD
