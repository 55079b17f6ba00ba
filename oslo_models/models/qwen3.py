"""Qwen3: Llama with query and key norms for each head."""

from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class Qwen3Parallel(LlamaParallel):
    """Sharding plan of the Qwen3 family."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")


class Qwen3Model(Qwen3Parallel, hf.Qwen3Model):
    pass


class Qwen3ForCausalLM(Qwen3Parallel, hf.Qwen3ForCausalLM):
    head_plan = LM_HEAD


class Qwen3ForSequenceClassification(Qwen3Parallel, hf.Qwen3ForSequenceClassification):
    head_plan = SCORE


class Qwen3ForTokenClassification(Qwen3Parallel, hf.Qwen3ForTokenClassification):
    head_plan = SCORE


class Qwen3ForQuestionAnswering(Qwen3Parallel, hf.Qwen3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
