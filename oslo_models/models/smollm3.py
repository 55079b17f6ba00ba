"""SmolLM3: Llama with some blocks without positions."""

from transformers import SmolLM3Config
from transformers.models.smollm3 import modeling_smollm3 as hf
from transformers.models.smollm3.modeling_smollm3 import SmolLM3PreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class SmolLM3Parallel(LlamaParallel):
    """Sharding plan of the SmolLM3 family."""


class SmolLM3Model(SmolLM3Parallel, hf.SmolLM3Model):
    pass


class SmolLM3ForCausalLM(SmolLM3Parallel, hf.SmolLM3ForCausalLM):
    head_plan = LM_HEAD


class SmolLM3ForSequenceClassification(SmolLM3Parallel, hf.SmolLM3ForSequenceClassification):
    head_plan = SCORE


class SmolLM3ForTokenClassification(SmolLM3Parallel, hf.SmolLM3ForTokenClassification):
    head_plan = SCORE


class SmolLM3ForQuestionAnswering(SmolLM3Parallel, hf.SmolLM3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
