"""GLM-4.5: Llama with query and key norms, and shared and routed experts in all except the first blocks."""

from transformers import Glm4MoeConfig
from transformers.models.glm4_moe import modeling_glm4_moe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3 import Qwen3Parallel


class Glm4MoeParallel(Qwen3Parallel):
    """Sharding plan of the GLM-4.5 (MoE) family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = (*mlp, *Qwen3Parallel.head_norms)


class Glm4MoeModel(Glm4MoeParallel, hf.Glm4MoeModel):
    pass


class Glm4MoeForCausalLM(Glm4MoeParallel, hf.Glm4MoeForCausalLM):
    head_plan = LM_HEAD
