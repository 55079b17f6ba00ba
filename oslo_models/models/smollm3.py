"""SmolLM3: Llama with some blocks without positions."""

from transformers import SmolLM3Config
from transformers.models.smollm3 import modeling_smollm3 as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class SmolLM3Model(LlamaParallel, hf.SmolLM3Model):
    pass


class SmolLM3ForCausalLM(LlamaParallel, hf.SmolLM3ForCausalLM):
    head_plan = LM_HEAD


class SmolLM3ForSequenceClassification(LlamaParallel, hf.SmolLM3ForSequenceClassification):
    head_plan = SCORE


class SmolLM3ForTokenClassification(LlamaParallel, hf.SmolLM3ForTokenClassification):
    head_plan = SCORE


class SmolLM3ForQuestionAnswering(LlamaParallel, hf.SmolLM3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
