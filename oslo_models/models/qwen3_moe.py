"""Qwen3 MoE: Qwen3 with a mixture of experts in some blocks."""

from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3 import Qwen3Parallel


class Qwen3MoeParallel(Qwen3Parallel):
    """Sharding plan of the Qwen3 MoE family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts()}
    optional = tuple(mlp)


class Qwen3MoeModel(Qwen3MoeParallel, hf.Qwen3MoeModel):
    pass


class Qwen3MoeForCausalLM(Qwen3MoeParallel, hf.Qwen3MoeForCausalLM):
    head_plan = LM_HEAD


class Qwen3MoeForSequenceClassification(Qwen3MoeParallel, hf.Qwen3MoeForSequenceClassification):
    head_plan = SCORE


class Qwen3MoeForTokenClassification(Qwen3MoeParallel, hf.Qwen3MoeForTokenClassification):
    head_plan = SCORE


class Qwen3MoeForQuestionAnswering(Qwen3MoeParallel, hf.Qwen3MoeForQuestionAnswering):
    head_plan = QA_OUTPUTS
