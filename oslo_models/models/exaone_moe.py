"""EXAONE MoE: Qwen3 with sliding windows, and shared and routed experts in some blocks."""

from transformers import ExaoneMoeConfig
from transformers.models.exaone_moe import modeling_exaone_moe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3 import Qwen3Parallel


class ExaoneMoeParallel(Qwen3Parallel):
    """Sharding plan of the EXAONE MoE family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts(shared="shared_experts")}
    optional = tuple(mlp)


class ExaoneMoeModel(ExaoneMoeParallel, hf.ExaoneMoeModel):
    pass


class ExaoneMoeForCausalLM(ExaoneMoeParallel, hf.ExaoneMoeForCausalLM):
    head_plan = LM_HEAD
