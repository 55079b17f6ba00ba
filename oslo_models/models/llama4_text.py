"""Llama 4, its text model: Llama with routed and shared experts; every expert computes every token."""

from transformers import Llama4TextConfig
from transformers.models.llama4 import modeling_llama4 as hf
from transformers.models.llama4.modeling_llama4 import Llama4PreTrainedModel

from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.plan import DenseExperts, Replicated


class Llama4Parallel(LlamaParallel):
    """Sharding plan of the Llama 4 family."""

    mlp = {
        **gated_mlp("feed_forward"),
        "feed_forward.router": Replicated(),
        "feed_forward.experts": DenseExperts(transposed=True),
        **gated_mlp("feed_forward.shared_expert"),
    }
    optional = tuple(mlp)


class Llama4TextModel(Llama4Parallel, hf.Llama4TextModel):
    pass


class Llama4ForCausalLM(Llama4Parallel, hf.Llama4ForCausalLM):
    base_model_prefix = "model"  # the prefix in transformers' class names no module
    head_plan = LM_HEAD
