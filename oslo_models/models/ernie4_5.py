"""ERNIE 4.5: Llama with interleaved rotary positions."""

from transformers import Ernie4_5Config
from transformers.models.ernie4_5 import modeling_ernie4_5 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class Ernie4_5Model(LlamaParallel, hf.Ernie4_5Model):
    pass


class Ernie4_5ForCausalLM(LlamaParallel, hf.Ernie4_5ForCausalLM):
    head_plan = LM_HEAD
