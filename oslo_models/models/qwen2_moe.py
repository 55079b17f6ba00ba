"""Qwen2 MoE: Qwen2 with a mixture of experts and a gated shared expert in some blocks."""

from typing import ClassVar

from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe import modeling_qwen2_moe as hf

from oslo_models.modeling.blocks import gated_mlp, mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.plan import Entries, Replicated


class Qwen2MoeParallel(LlamaParallel):
    """Sharding plan of the Qwen2 MoE family."""

    mixture: ClassVar[Entries] = {
        **mixture_of_experts(),
        **gated_mlp("mlp.shared_expert"),
        "mlp.shared_expert_gate": Replicated(),
    }
    mlp: ClassVar[Entries] = {**LlamaParallel.mlp, **mixture}
    optional = tuple(mlp)


class Qwen2MoeModel(Qwen2MoeParallel, hf.Qwen2MoeModel):
    pass


class Qwen2MoeForCausalLM(Qwen2MoeParallel, hf.Qwen2MoeForCausalLM):
    head_plan = LM_HEAD


class Qwen2MoeForSequenceClassification(Qwen2MoeParallel, hf.Qwen2MoeForSequenceClassification):
    head_plan = SCORE


class Qwen2MoeForTokenClassification(Qwen2MoeParallel, hf.Qwen2MoeForTokenClassification):
    head_plan = SCORE


class Qwen2MoeForQuestionAnswering(Qwen2MoeParallel, hf.Qwen2MoeForQuestionAnswering):
    head_plan = QA_OUTPUTS
