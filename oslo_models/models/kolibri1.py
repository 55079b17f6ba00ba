"""Kolibri 1: Qwen3 with four norms per block, and shared and routed experts in each."""

from transformers import Kolibri1Config
from transformers.models.kolibri1 import modeling_kolibri1 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.dots1 import Dots1Parallel


class Kolibri1Parallel(Dots1Parallel):
    """Sharding plan of the Kolibri 1 family."""

    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class Kolibri1Model(Kolibri1Parallel, hf.Kolibri1Model):
    pass


class Kolibri1ForCausalLM(Kolibri1Parallel, hf.Kolibri1ForCausalLM):
    head_plan = LM_HEAD
