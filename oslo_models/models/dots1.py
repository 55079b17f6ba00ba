"""dots.llm1: Qwen3 with a mixture of experts and shared experts in all except the first blocks."""

from transformers import Dots1Config
from transformers.models.dots1 import modeling_dots1 as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3 import Qwen3Parallel


class Dots1Parallel(Qwen3Parallel):
    """Sharding plan of the dots.llm1 family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = tuple(mlp)


class Dots1Model(Dots1Parallel, hf.Dots1Model):
    pass


class Dots1ForCausalLM(Dots1Parallel, hf.Dots1ForCausalLM):
    head_plan = LM_HEAD
