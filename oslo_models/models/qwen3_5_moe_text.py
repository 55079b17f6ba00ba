"""Qwen3.5 MoE, its text model: Qwen3.5 with the experts of Qwen3-Next."""

from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen2_moe import Qwen2MoeParallel
from oslo_models.models.qwen3_5_text import Qwen3_5Parallel


class Qwen3_5MoeParallel(Qwen3_5Parallel):
    """Sharding plan of the Qwen3.5 MoE family."""

    mlp = {**Qwen2MoeParallel.mixture}


class Qwen3_5MoeTextModel(Qwen3_5MoeParallel, hf.Qwen3_5MoeTextModel):
    pass


class Qwen3_5MoeForCausalLM(Qwen3_5MoeParallel, hf.Qwen3_5MoeForCausalLM):
    head_plan = LM_HEAD
